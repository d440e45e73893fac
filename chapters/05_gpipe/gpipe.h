#pragma once

// GPipe: micro-batches through a chain of stages.
//
//   slot      0  1  2  3  4  5  6  7  8  9 10 11 12 13
//   stage 0  F0 F1 F2 F3  .  .  .  .  .  . B3 B2 B1 B0
//   stage 1   . F0 F1 F2 F3  .  .  .  . B3 B2 B1 B0  .
//   stage 2   .  . F0 F1 F2 F3  .  . B3 B2 B1 B0  .  .
//   stage 3   .  .  . F0 F1 F2 F3 B3 B2 B1 B0  .  .  .
//
// Rank s holds stage s. All forwards, then all backwards from the last
// micro-batch to the first, then one update: as if one device had accumulated
// gradients over the micro-batches in that order.
//
//   PipelineModel model(options, layers, one_stage_per_rank(cuts), world);
//   Pipeline pipeline(model, world, pieces, trace_pieces(...), {});
//   const double loss = pipeline.train(feed);     // gradients are there
//
// Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using
// Pipeline Parallelism", section 2; Kim et al. 2020, "torchgpipe".

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "chapters/common/pipeline/pipeline.h"
#include "chapters/common/pipeline/stages.h"
#include "chapters/common/run/training.h"
#include "comm/process_group.h"

namespace shardbook::gpipe {

// --- The schedule ------------------------------------------------------------

enum class ActionKind { kForward, kBackward };
struct Action {
  ActionKind kind = ActionKind::kForward;
  int micro_batch = 0;
};
/// What one stage does, in order. A schedule is data: print it, draw it, test
/// it without ranks. All stages do the same, at different times.
std::vector<Action> schedule(int num_micro_batches);

/// The slot of an action where F and B take one slot each: b + s, and
/// (m + p - 1) + (m - 1 - b) + (p - 1 - s).
int slot(const Action& action, int stage, int num_stages,
         int num_micro_batches);
/// 2 (m + p - 1).
int num_slots(int num_stages, int num_micro_batches);
/// Share of the slots in which a stage does nothing: (p - 1) / (m + p - 1).
/// Papers also quote (p - 1) / m, which is the idle time over the busy one.
double idle_share(int num_stages, int num_micro_batches);
/// The figure above.
std::string figure(int num_stages, int num_micro_batches);

// --- Recomputation -----------------------------------------------------------

/// Which micro-batches keep their stage's input alone, and run forward again
/// before their backward.
enum class Checkpoint {
  kAlways,
  kExceptLast,  ///< the last one's backward comes first: nothing is saved there
  kNever
};
/// "always", "except_last", "never"; throws Error for others.
Checkpoint checkpoint_from_name(const std::string& name);

// --- The mini-batch ----------------------------------------------------------

/// Tensors of one mini-batch cut together on dim 0, in `chunks` pieces of rule
/// CEIL (which may give fewer). Throws Error for lengths that differ.
std::vector<Tensors> cut(const Tensors& batch, std::int64_t chunks);

/// What goes into a pipeline and what its output is compared with.
struct Feed {
  /// What the model reads; asked for on the first stage.
  std::function<Tensors(int micro_batch)> inputs;
  /// Mean over the rows, on the last stage. Called again by recomputation.
  std::function<Tensor(const Tensors& outputs, int micro_batch)> loss;
};

/// What all layers take, by rows of a micro-batch.
using PieceShapes = std::map<std::int64_t, std::vector<LayerInput>>;
/// `inputs` of the model, of any number of rows.
PieceShapes trace_pieces(const LayerList& layers,
                         const std::vector<MicroBatch>& pieces,
                         const Tensors& inputs, DType dtype);

// --- The engine --------------------------------------------------------------

struct PipelineOptions {
  Checkpoint checkpoint = Checkpoint::kExceptLast;
  /// Recompute before the gradient arrives, so that its way overlaps with it.
  bool early_recompute = true;
};

/// Runs `schedule` on this rank's stage, exchanging activations with the stages
/// next door; a tensor that is stashed here and popped two stages on goes there
/// directly.
class Pipeline {
 public:
  /// Rank s of `world` holds stage s of `model`. Keeps references. Throws Error
  /// for skips whose names do not match, and another number of ranks.
  Pipeline(PipelineModel& model, ProcessGroup& world,
           std::vector<MicroBatch> pieces, PieceShapes shapes,
           const PipelineOptions& options = {});

  /// Forward and backward of a mini-batch: adds the gradient of the mean loss
  /// to the parameters. Returns the mean loss on the last stage, 0 elsewhere.
  double train(const Feed& feed);
  /// Forward alone, without recomputation: the last stage's outputs, all
  /// micro-batches end to end; none elsewhere.
  Tensors infer(const Feed& feed);

  /// Bytes of activations and gradients that this rank sends in `train`.
  double predicted_bytes() const;
  /// The most micro-batches that were ever between forward and backward here.
  int max_live() const { return max_live_; }
  bool recomputes(int micro_batch) const;
  int num_micro_batches() const { return static_cast<int>(pieces_.size()); }

 private:
  /// A micro-batch between its forward and its backward: a graph, or the inputs
  /// and the random state that make it again.
  struct Live {
    StageRun run;
    Tensors inputs;
    RandomState random;
  };

  void forward(int b);
  void backward(int b);
  void recompute(Live& live, int b);
  StageFunction function(int b);
  Tensors receive_inputs(int b);
  void send_outputs(const Tensors& outputs, int b);
  Tensors receive_gradients(int b);
  void send_gradients(const Tensors& grads, int b);
  void set_random_state(int b);

  bool is_first() const { return stage_ == 0; }
  bool is_last() const { return stage_ == num_stages_ - 1; }
  double share(int b) const;
  /// What this stage takes, what it returns, and what travels on a skip.
  const LayerInput& input_spec(int b) const;
  const LayerInput& output_spec(int b) const;
  LayerInput skip_spec(const std::string& name, int b, bool is_incoming) const;

  PipelineModel& model_;
  int stage_, num_stages_;
  Stage& layers_;
  std::vector<MicroBatch> pieces_;
  PieceShapes shapes_;
  PipelineOptions options_;
  Mailbox mailbox_;
  std::map<std::string, SkipRoute> skips_;
  double rows_ = 0;

  // Of the mini-batch that runs.
  const Feed* feed_ = nullptr;
  std::map<int, Live> live_;
  std::map<int, Tensor> losses_;
  int max_live_ = 0;
};

}  // namespace shardbook::gpipe
