#pragma once

// The engine: three calls train a model, and a config chooses how.
//
//   DeepSpeedConfig config = DeepSpeedConfig::read("ds.json");
//   auto [engine, optimizer, loader, scheduler] =
//       engine::initialize(model, config, world, args);
//   for (std::int64_t i = 0; i < loader->size(); ++i) {
//     const Batch batch = loader->next_repeating();
//     Tensor loss = language_loss((*engine)(batch.inputs), batch.targets);
//     engine->backward(loss);
//     engine->step();
//   }
//
// The engine knows no algorithm of its own. Stage 0 is DistributedDataParallel,
// stages 1 to 3 are the ZeRO chapter's, and a model of the book whose layers are
// cut (pipelines, tensor parallelism, experts) is trained by its chapter's
// Strategy. The config chooses; the three calls stay the same.
//
// - backward divides the loss by gradient_accumulation_steps, g. User code must
//   not divide as well.
// - step is called after every backward, and acts on each g-th call only: it
//   clips, updates, forgets the gradients, and moves the scheduler on. After an
//   f16 gradient that overflowed it skips the update and the scheduler, while
//   global_steps and global_samples advance all the same.
// - Stages 0 and 1 reduce gradients once per step, stages 2 and 3 after each
//   backward.
// - A pipeline has only train_batch: its stages run forward and backward in an
//   order of their own.
//
// One engine per rank; all ranks make the same calls in the same order. Model and
// groups outlive it.
//
// microsoft/DeepSpeed, deepspeed/runtime/engine.py, pipe/engine.py.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "chapters/15_engine/deepspeed_config.h"
#include "chapters/15_engine/loader.h"
#include "chapters/15_engine/lr_schedules.h"
#include "chapters/common/models/models.h"
#include "chapters/common/run/strategy.h"
#include "chapters/common/sharded/parts.h"
#include "comm/process_group.h"
#include "core/module.h"

namespace shardbook::engine {

class Engine;
namespace internal {
class DataParallelModel;
class StepLog;
}  // namespace internal

/// Groups of a model whose layers are cut already (DeepSpeed's mpu).
struct Mpu {
  ProcessGroup* data = nullptr;   ///< ranks with the same part of the model
  ProcessGroup* model = nullptr;  ///< ranks that share the layers
  /// The part that a rank of `model` holds of each parameter; the norm of the
  /// gradient counts elements on several ranks once.
  ParameterLayout layout = {};
};

/// Optional arguments besides model and config.
struct InitializeArgs {
  /// A config's file; together with a config it is an error.
  std::string deepspeed_config;
  /// Trained; all others are frozen. Empty: all parameters of the model.
  Tensors model_parameters = {};
  /// In place of the config's section.
  std::optional<OptimizerConfig> optimizer = {};
  std::shared_ptr<LrScheduler> lr_scheduler = {};
  Mpu mpu = {};
  std::optional<TrainingData> training_data = {};
  std::uint64_t seed = 0;  ///< of the loader's order
};

/// While it lives, backward sums gradients on this rank and sends nothing.
class [[nodiscard]] NoSync {
 public:
  explicit NoSync(Engine& engine);
  ~NoSync();
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  Engine& engine_;
};

class Engine {
 public:
  /// Around a module (use `initialize`), or else around a chapter's strategy,
  /// which has only train_batch.
  Engine(const DeepSpeedConfig& config, const BatchSizes& sizes,
         ProcessGroup& world,
         std::unique_ptr<internal::DataParallelModel> model,
         std::unique_ptr<Strategy> strategy,
         std::shared_ptr<LrScheduler> scheduler);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // --- Modules -----------------------------------------------------------------

  /// The model's forward. With fp16.auto_cast, inputs are cast first.
  Tensor operator()(const Tensor& inputs) { return forward(inputs); }
  Tensor forward(const Tensor& inputs);
  /// Adds the gradient of loss / g, in f16 times the loss scale, and reduces it
  /// where the stage does so now. Throws Error for a loss that is not a scalar.
  void backward(const Tensor& loss);
  /// Ends a micro-step. At the boundary: clip, update, forget the gradients,
  /// scheduler. Illegal inside no_sync.
  void step();
  /// Cover forward and backward with it. The division by g still applies, and
  /// micro-steps count at `step` only. Throws Error with ZeRO-2 and -3, whose
  /// ranks keep no whole gradients.
  NoSync no_sync();
  /// Whether the next backward is the last one before an update: every g-th, or
  /// as set_gradient_accumulation_boundary has set.
  bool is_gradient_accumulation_boundary() const;
  /// From now on a front end sets the boundary before each forward.
  void set_gradient_accumulation_boundary(bool is_boundary) {
    boundary_ = is_boundary;
  }

  // --- All -------------------------------------------------------------------

  /// One optimizer step over g micro-batches. Returns the mean loss over all
  /// data-parallel ranks, on every rank. `next` gives this rank's next
  /// micro-batch. Of a strategy: no `next`, the strategy reads the data of its
  /// options.
  double train_batch(const std::function<Batch()>& next,
                     const LossFunction& loss_of = language_loss);
  double train_batch();

  /// Counts from this step on, for a run whose state was loaded elsewhere.
  void begin_at(std::int64_t global_steps, std::int64_t skipped_steps = 0);

  std::int64_t global_steps() const { return global_steps_; }
  std::int64_t global_samples() const { return global_samples_; }
  std::int64_t micro_steps() const { return micro_steps_; }
  std::int64_t skipped_steps() const { return skipped_steps_; }
  double get_lr() const;
  void set_lr(double lr);
  /// The norm of the last step, before clipping, without the loss scale.
  double get_global_grad_norm() const { return grad_norm_; }
  /// A module's loss scale; 1 without f16.
  double loss_scale() const;
  bool was_step_applied() const { return was_applied_; }
  /// The last step as that of a Strategy, with its loss.
  StepResult step_result(double loss) const;
  std::int64_t gradient_accumulation_steps() const {
    return sizes_.accumulation;
  }
  std::int64_t train_batch_size() const { return sizes_.train; }
  std::int64_t train_micro_batch_size_per_gpu() const { return sizes_.micro; }

  const DeepSpeedConfig& config() const { return config_; }
  Optimizer& optimizer();
  LrScheduler* lr_scheduler() { return scheduler_.get(); }
  /// Replaces the scheduler; with null, only set_lr changes the rate.
  void set_lr_scheduler(std::shared_ptr<LrScheduler> scheduler);
  /// The module; throws Error for a strategy.
  Module& module();
  ProcessGroup& data_parallel_group();

  /// All parameters and buffers, whole, on rank 0's host. Collective.
  std::vector<NamedTensor> full_state();
  /// This rank's parts of all that training changes.
  TrainingState state();
  /// A module's f16 loss scale; null without one.
  DynamicLossScaler* scaler() { return scaler_.get(); }
  /// Steps, rate, scheduler and loss scale, by name; and back.
  std::map<std::string, double> numbers() const;
  void set_numbers(const std::map<std::string, double>& numbers);
  /// Saves the training in FOLDER/TAG, and TAG in FOLDER/latest. Collective.
  void save_checkpoint(const std::string& folder, const std::string& tag);
  /// Resumes from FOLDER/TAG (empty: the latest), written by any number of
  /// ranks and any stage. Returns the tag. Throws Error that names the
  /// mismatch, the same on all ranks. Collective.
  std::string load_checkpoint(const std::string& folder,
                              const std::string& tag = "");

  /// Where the lines of steps_per_print and wall_clock_breakdown go; stderr to
  /// begin with.
  void set_log(std::function<void(const std::string& line)> log);
  /// A module's wrapper, which predicts its bill.
  const internal::DataParallelModel& model() const { return *model_; }

 private:
  friend class NoSync;
  void check_module(const char* call) const;
  void time_backward(const Tensor& loss);
  void finish_step(double norm, bool is_skipped);

  DeepSpeedConfig config_;
  BatchSizes sizes_;
  ProcessGroup& world_;
  std::unique_ptr<internal::DataParallelModel> model_;
  std::unique_ptr<Strategy> strategy_;
  std::shared_ptr<LrScheduler> scheduler_;
  std::unique_ptr<DynamicLossScaler> scaler_;
  std::unique_ptr<internal::StepLog> log_;
  std::optional<bool> boundary_;
  int no_sync_depth_ = 0;
  bool forward_reduces_ = false;
  std::int64_t micro_steps_ = 0, global_steps_ = 0, global_samples_ = 0;
  std::int64_t skipped_steps_ = 0;
  double grad_norm_ = 0;
  bool was_applied_ = false;
};

struct Initialized {
  std::unique_ptr<Engine> engine;
  Optimizer* optimizer = nullptr;  ///< the engine's
  std::unique_ptr<Loader> loader;  ///< with training_data
  LrScheduler* lr_scheduler = nullptr;
};

/// Casts the model to bf16 or f16 where the config says so, gives every rank the
/// first one's weights, and wraps it: stage 0 in DistributedDataParallel, stages 1
/// to 3 in ZeRO. Layers of experts (moe::MoeLayer) that the module has stay spread
/// over their groups, stages 0 to 2 reduce them over the ranks that hold the same
/// ones, and their gates' losses start from the number that the loss starts from.
/// Throws Error that names the keys for a config that needs a model of the book
/// (pipelines, layers to be cut or replaced). Collective.
Initialized initialize(Module& model, const DeepSpeedConfig& config,
                       ProcessGroup& world, const InitializeArgs& args = {});
/// The same with the config in the file args.deepspeed_config.
Initialized initialize(Module& model, ProcessGroup& world,
                       const InitializeArgs& args);
/// The scheduler that a config asks for; null for none. The optimizer's rate
/// comes from the config, or from `optimizer`.
std::shared_ptr<LrScheduler> make_scheduler(const DeepSpeedConfig& config,
                                            const OptimizerConfig& optimizer);
/// The same as a function of the optimizer step.
LrSchedule schedule_of(const DeepSpeedConfig& config,
                       const OptimizerConfig& optimizer);

}  // namespace shardbook::engine
