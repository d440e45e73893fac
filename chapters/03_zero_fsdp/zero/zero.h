#pragma once

// ZeRO: data parallelism without redundant copies.
//
// Under DDP all ranks hold the same parameters, the same gradients and the same
// optimizer state. ZeRO gives each rank a shard of them, and fetches the rest
// when it is needed:
//
//               parameters   gradients   optimizer state   traffic per step
//   DDP              all         all          all              2 Np
//   ZeRO stage 1     all         all         shard             2 Np
//   ZeRO stage 2     all        shard        shard             2 Np
//   ZeRO stage 3    shard       shard        shard             3 Np
//
//   auto zero = zero::make_zero(model, world, options, "adamw", adam_options);
//   for (each step) {
//     language_loss((*zero)(batch.inputs), batch.targets).backward();
//     zero->step();            // clips, updates, publishes, forgets gradients
//   }
//
// Updates equal DDP's bit for bit if sums add in rank order: the optimizers of
// this book update element by element, so shards make no difference. One that
// needs norms of whole tensors (LAMB, LARS) would use norms of slices, and be
// wrong.
//
// Parameters that the loss does not depend on get zero gradients, unlike under
// DDP: one flat tensor has one update. All ranks construct, call, step and
// destroy in the same order. Model and group must outlive the object.
// Parameters move to this rank's current device: build the model on the host
// when it does not fit the device.
//
// A forward may throw: the next one begins anew. After a backward that threw,
// backward and step() throw until clear_grad(), then the step can be repeated;
// after a step() that threw when parameters had changed, until a checkpoint is
// loaded into state().
//
// Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training
// Trillion Parameter Models"; Ren et al. 2021, "ZeRO-Offload". The names of
// options are DeepSpeed's.

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "chapters/03_zero_fsdp/shard_layout.h"
#include "chapters/03_zero_fsdp/zero/zero_offload.h"
#include "chapters/03_zero_fsdp/zero/zero_options.h"
#include "chapters/common/run/textbook.h"
#include "chapters/common/run/training_state.h"
#include "comm/process_group.h"
#include "core/module.h"
#include "core/optim.h"

namespace shardbook::zero {

/// Seconds to all-reduce the loss (may overlap the last backward) and the norm.
struct Sums {
  double loss_s = 0, norm_s = 0;
};

class ZeroOptimizer {
 public:
  virtual ~ZeroOptimizer();
  ZeroOptimizer(const ZeroOptimizer&) = delete;
  ZeroOptimizer& operator=(const ZeroOptimizer&) = delete;

  /// The model's forward.
  Tensor operator()(const Tensor& x) {
    check_usable("forward");
    check_frozen();
    return module_(x);
  }

  /// Sets whether the next backward is the last one of its step (DeepSpeed's
  /// gradient accumulation boundary); true at first. Nothing divides by the
  /// number of micro-steps: scale the loss.
  void set_boundary(bool is_last) { is_boundary_ = is_last; }

  /// Clips, updates this rank's shard, gives every rank the new parameters and
  /// forgets the gradients. Returns the norm of the global gradient before
  /// clipping (one all-reduce of an f64); inf or nan when the step was left
  /// out. Collective.
  double step();
  /// This rank's parts of the gradient, after pending reductions. If the model
  /// is part of a larger one (tensor parallelism, experts), the caller sums
  /// these over further groups and computes the whole norm. Collective.
  std::vector<NamedTensor> own_gradients();
  /// The sum of their squares, in one operation per dtype.
  double sum_of_squares() const;
  /// Two sums: of the parameters for which `is_second` is false, and true. Next to
  /// each other in the shard, those of one sum need one operation.
  std::array<double, 2> sums_of_squares(
      const std::function<bool(const std::string& name)>& is_second) const;
  /// The same as step(), given the norm, already divided by the loss scale.
  double step(double norm);
  /// Drops the gradients of the step, or of a failed backward.
  void clear_grad();

  /// Makes the optimizer of the shards; called once, by make_zero.
  void make_sharded_optimizer(const std::string& name,
                              const OptimizerOptions& options);
  /// Updates this rank's flat shards, one per dtype.
  Optimizer& optimizer() { return *optimizer_; }
  void set_lr(double lr) { optimizer_->set_lr(lr); }
  /// Replaces ZeroOptions::loss_scale, from the next backward on.
  void set_loss_scale(double scale) { loss_scale_ = scale; }
  std::int64_t num_skipped_steps() const { return num_skipped_; }

  Module& module() { return module_; }
  ProcessGroup& group() const { return group_; }
  const ZeroOptions& options() const { return options_; }
  /// Bytes between host and device since construction; not on the wire.
  const HostTraffic& host_traffic() const { return host_traffic_; }

  /// Bytes that this rank sends: construction, then `steps` steps of
  /// `micro_steps` micro-steps each.
  virtual double predicted_bytes(std::int64_t steps,
                                 std::int64_t micro_steps) const = 0;
  /// Bytes that this rank sends after a checkpoint is loaded: it publishes its
  /// parameters, as after a step.
  double predicted_load_bytes() const;
  /// Bytes of the parameters that are then whole on every rank, padded.
  virtual double published_bytes() const = 0;
  /// Seconds on the cluster `textbook`, as a closed form, of the last of `steps`
  /// steps, with micro-steps of `model`. Not predicted under offload, for stages 1
  /// and 2 with several buckets, and if stage 3 keeps only some of its layers.
  /// Without `sums`, both run over the ranks of this object.
  double step_s(const textbook::ModelTimes& model, std::int64_t steps,
                std::int64_t micro_steps, std::optional<Sums> sums = {}) const;
  /// Elements of this rank's shard, padding included.
  std::int64_t shard_numel() const;

  // --- State -----------------------------------------------------------------

  /// This rank's parts of parameters, master copies and optimizer state, as
  /// views: no communication, no copies. Leaves out padding and, in stages 1
  /// and 2, frozen parameters, which are not sharded.
  TrainingState state();
  /// Parameters by name, whole, on the host, on every rank (or, with
  /// `rank0_only`, empty elsewhere). Gathers at most allgather_bucket_size
  /// elements at a time. Collective.
  std::vector<NamedTensor> full_parameters(bool rank0_only = false);
  std::int64_t steps_done() const { return steps_done_; }

 protected:
  /// Parameters that are sharded together: one dtype, trained or frozen.
  struct ShardGroup {
    bool is_trained = true;
    std::vector<NamedTensor> parameters;
    ShardLayout layout;
    Tensor shard;  ///< [S], this rank's parameters; updated here
    Tensor grad;   ///< [S] of shard_dtype(), trained groups only; padding is
                   ///< zero
    /// [S], a copy on the device that is sent to other ranks, if the shard is
    /// on the host.
    Tensor on_device;
  };

  ZeroOptimizer(Module& module, ProcessGroup& group,
                const ZeroOptions& options);
  /// The parameters as groups without shards, in order of definition. Trained
  /// groups come first: slot i of the optimizer is group i.
  std::vector<ShardGroup> group_parameters(bool with_frozen);
  /// The dtype of the shards of gradients of this dtype, stages 2 and 3.
  DType shard_dtype(DType gradient) const;
  /// Bytes of an element of this dtype on the wire.
  std::int64_t wire_bytes(DType dtype) const;
  /// The bucket, or its copy in the dtype of the wire.
  Tensor sent_as(const Tensor& bucket) const;

  /// step_s on the device.
  virtual double time_of(const textbook::ModelTimes& model, std::int64_t steps,
                         std::int64_t micro_steps, const Sums& sums) const = 0;
  /// Called before an update: brings the last reductions into `grad`.
  virtual void finish_gradients() = 0;
  /// Called after an update (or a load, which changes frozen ones, too): sends
  /// the new parameters, from the device, to all ranks.
  virtual void publish(bool with_frozen) = 0;
  /// Drops the gradients, also those in flight.
  virtual void clear_gradients() = 0;
  /// Called at a backward's first gradient: calls `ended` at its end; if it
  /// throws before, later backwards and steps throw.
  void watch_backward(std::function<void()> ended);
  bool is_in_backward() const { return is_in_backward_; }

  Module& module_;
  ProcessGroup& group_;
  const ZeroOptions options_;
  std::vector<ShardGroup> groups_;
  std::unique_ptr<Optimizer> optimizer_;
  HostTraffic host_traffic_;
  bool is_boundary_ = true;

 private:
  /// Throws Error after a failure in the middle of an operation.
  void check_usable(const char* what) const;
  /// Throws for a parameter that trains and was frozen when shards were made.
  void check_frozen() const;
  /// One step of a group's shard, sub-group by sub-group.
  void update_shard(std::size_t group, double factor);
  /// Starts to copy elements [begin, begin + numel) to the device.
  void bring_back(const ShardGroup& group, std::int64_t begin,
                  std::int64_t numel);
  void finish_bringing_back();

  std::string optimizer_name_;
  std::vector<Event> returning_;  ///< copies to the device under way
  std::int64_t steps_done_ = 0;
  std::int64_t num_skipped_ = 0;
  double loss_scale_ = 1;
  bool is_in_backward_ = false;
  std::vector<NamedTensor> frozen_;  ///< at construction
  bool has_failed_backward_ = false;
  bool is_updating_ = false;  ///< stays true when step() fails
};

/// ZeRO of stage options.stage. Begins with rank 0's values on every rank.
/// Throws Error on every rank when models differ, and for contradictory
/// options. Collective.
std::unique_ptr<ZeroOptimizer> make_zero(
    Module& module, ProcessGroup& group, const ZeroOptions& options,
    const std::string& optimizer, const OptimizerOptions& optimizer_options);

}  // namespace shardbook::zero
