#pragma once

// The loop around a chapter's training step, the same for every chapter.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "chapters/common/models/data.h"
#include "chapters/common/models/models.h"
#include "chapters/common/run/loss_scaler.h"
#include "chapters/common/run/micro_batches.h"
#include "chapters/common/run/options.h"
#include "comm/process_group.h"
#include "core/optim.h"

namespace shardbook {

/// The results of one optimizer step: the mean loss over the global batch, and
/// the norm of the global gradient before clipping.
struct StepResult {
  double loss = 0;
  double grad_norm = 0;
  /// The step finishes with a later one (replicas of a stage alternate
  /// batches), whose result has its loss. All of them share one norm and one
  /// total time.
  bool is_open = false;
  /// The norm is not finite, and all ranks have left the update out.
  bool was_skipped = false;
  std::vector<double> open_losses = {};  ///< of the open steps before this one
};

class Checkpoints;

struct TrainingLog {
  std::vector<double> losses;
  std::vector<double> grad_norms;
  /// Median over the steps, without the first.
  double step_s = 0;
  /// Where numbers first stopped being finite on this rank; step -1: nowhere.
  struct NotFinite {
    std::int64_t step = -1;
    /// This rank computed the loss itself; false where the loss came from
    /// another rank, or the gradient of all ranks was not finite.
    bool is_own_loss = false;
    bool is_gradient = false;
  } not_finite;
};

/// Call it at the end of each forward: the activations in use count as kept for
/// backward (report.h).
void note_kept_activations();

/// Runs options.steps steps from options.first_step on: sets the learning rate and
/// the random state of each, calls `step(k)`, keeps `checkpoints` (null: none), and
/// (on the main rank) writes --log and shows progress on a terminal. Throws
/// Interrupted after a signal; with checkpoints, after the same step on all ranks.
TrainingLog train(const Options& options, Optimizer& optimizer, bool is_main,
                  const std::function<StepResult(std::int64_t)>& step,
                  Checkpoints* checkpoints = nullptr);

/// Model, config and weights as the options say: built from the seed on the
/// current device, then loaded from --load.
struct LoadedModel {
  ModelConfig config;
  std::unique_ptr<Module> model;
};
ModelConfig model_config(const ModelOptions& options);
LoadedModel build_model(const Options& options);
/// The model of the options with these parameters and buffers, by name.
LoadedModel model_with(const Options& options,
                       const std::vector<NamedTensor>& state);

/// Trains one device on the whole batch in these pieces: the run that every
/// chapter is compared with. Each piece counts by its share of the rows;
/// gradients are summed in the order of the list.
struct ReferenceRun {
  std::vector<double> losses = {};
  std::vector<double> grad_norms = {};  ///< empty: not known
  std::vector<NamedTensor> parameters = {};
  /// How far Adam may carry the rounding of gradients, for each element of each
  /// parameter (parity.h); empty: not known.
  std::vector<std::vector<double>> slack = {};
};
struct OneDevice {
  /// Batch norms update their running statistics once per step, from all pieces,
  /// as pipelines do; the run returns these as well.
  bool defers_statistics = false;
  /// f16: the loss is scaled, and steps that overflow are left out.
  const DynamicLossScaler* scaler = nullptr;
  /// The pieces belong to so many replicas, one after another. Gradients are
  /// summed for each replica, then over replicas, as ranks do, with the same
  /// bits: where each step makes differences a thousand times larger, another
  /// order of the sums would give other weights.
  int replicas = 1;
  /// A replica's gradients are of its own mean loss, and are divided by the
  /// number of replicas before the sum: in f16 they overflow where a rank's do.
  bool averages_replicas = false;
};
ReferenceRun train_one_device(const Options& options,
                              const std::vector<MicroBatch>& pieces,
                              const OneDevice& setup = {});
/// In strided pieces.
ReferenceRun train_one_device(const Options& options,
                              std::int64_t num_micro_batches = 1);

/// Forward and backward of one global batch in pieces, on this device: adds
/// `loss_scale` times the gradient of the mean loss to the parameters, and
/// returns the mean loss. `loss_of` is the loss of the model's LayerFactory; a
/// model's balancing loss is added (llama_experts.h).
double accumulate_gradients(const Options& options, Module& model,
                            const Dataset& data, std::int64_t step,
                            const std::vector<MicroBatch>& pieces,
                            double loss_scale = 1,
                            const LossFunction& loss_of = language_loss);
double accumulate_gradients(const Options& options, Module& model,
                            const Dataset& data, std::int64_t step,
                            std::int64_t num_micro_batches,
                            double loss_scale = 1);

/// Adds `factor` times the gradient of one piece's mean loss to the parameters,
/// and returns that loss.
using PieceGradients =
    std::function<double(const MicroBatch& piece, double factor)>;
/// The loop of accumulate_gradients, with another way to compute a piece.
double accumulate_pieces(const Options& options, Module& model,
                         const std::vector<MicroBatch>& pieces,
                         double loss_scale, const PieceGradients& add);

/// Forward and backward of this rank's samples of a global batch, in
/// `num_micro_batches` pieces: rank r of d takes samples r, r + d, r + 2d, ...,
/// and its piece i of g the samples r + d i, r + d (i + g), ... of those.
/// `begin_piece` is told whether a piece is the last one, `forward` returns the
/// outputs for its inputs. Each piece counts 1/g in the gradients; the mean
/// over the ranks is up to the strategy. Returns the mean loss over the global
/// batch, an f64 on every rank: its all-reduce is under way during the last
/// backward. `backward` adds the gradient of a piece's loss by itself, its
/// share included; empty: the graph's backward.
Tensor data_parallel_gradients(
    const Options& options, ProcessGroup& dp, const Dataset& data,
    std::int64_t step, std::int64_t num_micro_batches,
    const std::function<void(bool is_last)>& begin_piece,
    const std::function<Tensor(const Tensor& inputs)>& forward,
    const LossFunction& loss_of = language_loss,
    const std::function<void(const Tensor& loss)>& backward = {});
/// Throws Error where the ranks, or their pieces, would not have equally many
/// samples. `option` sets the number of pieces.
void check_even_batch(const ModelOptions& options, int num_ranks,
                      std::int64_t num_micro_batches,
                      const std::string& option);

/// Clips (--clip), updates and clears the gradients. Returns the norm.
double update_parameters(const Options& options, Optimizer& optimizer);

/// The same for gradients of a loss that was multiplied by the scaler's factor
/// (f16): divides them by it, and leaves the update out where they overflowed;
/// the norm is then not finite. Tells the scaler.
double update_unscaled(const Options& options, Optimizer& optimizer,
                       DynamicLossScaler& scaler);

/// The same with a known norm, of a gradient that lies on several ranks.
void clip_and_update(const Options& options, Optimizer& optimizer, double norm);

/// Writes the files of --save and --logits. Throws RunError, and leaves the
/// file as it was, where weights are not finite and --save-non-finite is off.
void save_results(const Options& options, const LoadedModel& model,
                  const Dataset& data);

}  // namespace shardbook
