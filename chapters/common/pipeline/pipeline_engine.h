#pragma once

// Ranks that execute a schedule.
//
//   Schedule schedule = schedules::one_f_one_b(4, 8);
//   PipelineModel model(options, layers, layout_of(schedule, cuts), world);
//   Engine engine(schedule, model, world, feed);
//   const double loss = engine.run();     // gradients are in the parameters
//
// Every rank runs its own list from top to bottom. F receives activations, runs
// a stage and sends its outputs; B receives the gradients of these outputs,
// runs backward and sends the gradients of the inputs; I is a B that leaves the
// weights' gradients for a W. There is no clock: an action waits for the
// message that it reads, and a send never waits, so any list that `check`
// accepts runs to its end.
//
// Under every schedule, a stage may drop its graph and run forward again before
// its backward (schedule.h). Where each rank holds one stage, a tensor that
// one stage stashes and a later one pops travels directly between the two. In
// schedules that flush, batch norms update their running statistics once per
// run, from all micro-batches: at its end, or later, where replicas of the
// pipeline add theirs first.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "chapters/common/pipeline/mailbox.h"
#include "chapters/common/pipeline/pipeline_model.h"
#include "chapters/common/pipeline/replay.h"
#include "chapters/common/pipeline/schedule.h"
#include "chapters/common/pipeline/stages.h"
#include "chapters/common/pipeline/steady.h"
#include "core/weight_gradients.h"
#include "sim/steady_state.h"

namespace shardbook::pipeline {

/// Keeps versions of the weights for schedules with updates between the forward
/// and the backward of a micro-batch, which must read the same weights.
class WeightVersions {
 public:
  virtual ~WeightVersions() = default;
  virtual void before_forward(int micro_batch) = 0;
  /// The forward is about to run again.
  virtual void before_recompute(int micro_batch) = 0;
  /// `run` and `grad_outputs` are the arguments of the backward that follows.
  virtual void before_backward(int micro_batch, const StageRun& run,
                               const Tensors& grad_outputs) = 0;
  virtual void after_backward(int micro_batch) = 0;
  /// The gradients are complete up to `micro_batch`.
  virtual void update(int micro_batch) = 0;
};

/// The ranks of each stage, from the schedule's routes.
PipelineLayout layout_of(const Schedule& schedule,
                         const std::vector<int>& cuts);

/// Bytes of one layer of the model for a micro-batch of `rows` samples.
using LayerBytes = std::function<double(int layer, std::int64_t rows)>;

/// Seconds of one layer for a micro-batch of `rows` samples.
using LayerCosts = std::function<Costs(int layer, std::int64_t rows)>;

struct EngineOptions {
  Recompute recompute = Recompute::kNever;
  /// Recompute before the gradient arrives, not after it.
  bool early_recompute = true;
  /// Losses stay on the device until the end of the run. Reading each loss at
  /// once would make the host wait for the device.
  bool reads_losses_late = false;
  /// On shapes, leave out micro-batches whose time and memory repeat.
  bool leaves_out_repetitions = true;
  /// At the end of a run, batch norms update their running statistics. If
  /// false, the caller calls commit_batch_norms.
  bool commits_statistics = true;
};

class Engine {
 public:
  /// Throws Error (see `check`) for an unsound schedule, for a `world` or a
  /// layout of another size, for skips without two ends, and for skips between
  /// ranks with several stages. Keeps references. `versions`: for schedules
  /// that do not flush.
  Engine(Schedule schedule, PipelineModel& model, ProcessGroup& world,
         Feed& feed, WeightVersions* versions = nullptr,
         const EngineOptions& options = {});

  /// Runs the whole list. Returns this rank's part of the loss: the sum of
  /// share * loss over the micro-batches whose last stage is here. Once a run
  /// has thrown, all later runs throw Error: its gradients, graphs and messages
  /// are left over.
  ///
  /// With `stands`, the forwards at the head of the list run before it is known
  /// whether the last update is valid: `stands` is called before the first
  /// other action. If it returns false, on all ranks, these forwards run again,
  /// and receivers discard the earlier messages. For schedules with one chunk
  /// per rank.
  double run(const std::function<bool()>& stands = {});
  /// Runs the forwards of the list alone, without graphs, and leaves gradients
  /// as they are. Returns what `run` returns. For schedules that flush.
  double evaluate();
  /// Runs the list up to and including the next U; false when it has ended.
  bool run_to_update();
  /// `on_loss` gets share * loss of each micro-batch whose last stage is here,
  /// when its backward begins. In schedules that do not flush, the engine
  /// forgets the loss then.
  void set_on_loss(std::function<void(int micro_batch, double loss)> on_loss) {
    on_loss_ = std::move(on_loss);
  }
  /// Share * loss of a micro-batch whose last stage is here.
  double loss(int micro_batch);

  const Schedule& schedule() const { return schedule_; }
  /// Whether the action under way is the last of its kind (B, I or W) for its
  /// stage on this rank: the gradients that it adds are the last ones. For
  /// schedules that flush.
  bool adds_last_gradients() const;
  /// On shapes, a run leaves out micro-batches whose time and memory repeat:
  /// the number of these.
  int num_left_out() const { return num_left_out_; }
  /// Bytes that this rank sends in one run of its list.
  double predicted_bytes();
  /// Bytes that this rank sends again when `stands` returns false.
  double predicted_redo_bytes();
  /// The most bytes of activations that this rank keeps at the end of a
  /// forward. A layer keeps `kept` between F and B or I, and `deferred` between
  /// I and W; with `keeps_input`, the stage's input as well.
  double predicted_kept(const LayerBytes& kept, const LayerBytes& deferred,
                        bool keeps_input = true);
  /// When this schedule's actions begin and end on the cluster `textbook`, from
  /// seconds of layers; see replay.h. `begins`: when each rank begins.
  Replay predicted_times(const LayerCosts& layers,
                         const std::vector<double>& begins = {});
  /// The largest number of sets of activations (each from F to B or W) that
  /// this rank has held at once.
  int max_live() const { return max_live_; }
  /// The inputs of stage `stage` for a micro-batch (num_stages: the outputs).
  const LayerInput& spec(int micro_batch, int stage);

 private:
  /// A micro-batch between forward and backward: its graph, or the inputs and
  /// the random state from which to recompute it.
  struct Live {
    StageRun run;
    bool is_dropped = false;
    Tensors inputs;
    RandomState random;
  };
  /// A loss on the device (`value`), or read by the host (`read`).
  struct Loss {
    Tensor value;
    double share = 1;
    double read = 0;
  };

  void check_not_failed() const;
  double sum_of_losses();
  void perform(const Action& action);
  bool may_leave_out();
  void leave_out_repetitions(const Steady& steady, sim::SteadyState& watched);
  StageFunction function(int b, int stage);
  void set_random_state(int b, int stage);
  void recompute(Live& live, int b, int stage);
  void note_loss(const Tensor& value, int b);
  Tensors receive_inputs(int b, int stage);
  void send_outputs(const Tensors& outputs, int b, int stage);
  Tensors receive_gradients(int b, int stage);
  void send_gradients(const Tensors& grads, int b, int stage);
  LayerInput skip_spec(const std::string& name, int b, int stage);
  void check_skips();
  double sent_bytes(int first, int last);
  double layers_bytes(int b, int stage, const LayerBytes& bytes);
  double set_bytes(int b, int stage, const LayerBytes& kept);
  int num_first_forwards(int rank) const;
  void redo_first_forwards();
  void forward(int b, int stage);
  void backward(int b, int stage);
  void backward_input(int b, int stage, WeightGradients& later);
  int rank_of(int b, int stage) const { return schedule_.place(b, stage).rank; }
  bool is_here(int b, int stage) const;
  bool is_last(int stage) const { return stage == schedule_.num_stages - 1; }

  Schedule schedule_;
  PipelineModel& model_;
  ProcessGroup& world_;
  Feed& feed_;
  WeightVersions* versions_;
  EngineOptions options_;
  Recomputed recomputed_;
  Mailbox mailbox_;
  /// Skips between stages, by name.
  std::map<std::string, SkipRoute> skips_;
  /// By rows.
  std::map<std::int64_t, std::vector<LayerInput>> specs_;
  /// By chunk.
  std::vector<int> stages_;
  std::vector<WeightGradients> later_;
  /// Between F and B, by micro-batch and stage.
  std::map<std::pair<int, int>, Live> runs_;
  std::map<int, Loss> losses_;
  TensorOptions loss_options_;
  std::function<void(int, double)> on_loss_;
  ActionWalk walk_;
  int live_ = 0, max_live_ = 0;
  int num_left_out_ = 0;
  /// A run of the list has begun and not returned: stays so after an exception.
  bool is_running_ = false;
};

}  // namespace shardbook::pipeline
