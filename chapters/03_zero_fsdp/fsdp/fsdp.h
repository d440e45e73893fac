#pragma once

// FullyShardedDataParallel: parameters, gradients and optimizer state in
// shards; a unit at a time is made whole when it computes.
//
//   FsdpOptions options;
//   options.auto_wrap_policy = transformer_auto_wrap_policy({"GptBlock"});
//   FullyShardedDataParallel fsdp(model, world, options);
//   auto optimizer = make_optimizer("adamw", fsdp.parameters(), {});
//   for (each step) {
//     language_loss(fsdp(batch.inputs), batch.targets).backward();
//     fsdp.clip_grad_norm_(1.0);
//     optimizer->step();                   // on this rank's shards
//     fsdp.clear_grad();
//   }
//
//   forward    gather u | compute u | free u       (the root stays whole)
//   backward   gather u, prefetch u - 1 | compute u | free u, reduce-scatter u
//
// Gathers per unit and micro-step: FULL_SHARD 2 (the root 1), SHARD_GRAD_OP 1.
// One reduce-scatter travels while the next unit computes. Gradients are those
// of DDP: the mean over ranks; bit for bit if d is a power of two and ranks sum
// in order.
//
// The model's tensors are replaced: create the optimizer afterwards, from
// parameters(). Between steps the model's own parameters hold nothing; read
// them under summon_full_params. The optimizer must work element by element
// (LAMB and LARS would see norms of slices). All ranks construct, call and
// destroy it, and use the same units, in the same order; the first iteration
// checks the units. Model and group must outlive it, and the model is empty
// after it: take a full state dict before.
//
// A module that runs twice is gathered for each forward and reduced once. A
// unit that no output depends on gets no gradient; in other units, a parameter
// without a gradient counts as zero.
//
// A forward may throw: the next one begins anew. When a backward throws, this
// object drops the gradients of the step, and then throws until clear_grad() is
// called, after which the step can be repeated.
//
// Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data
// Parallel", sections 3 and 4; Rajbhandari et al. 2020, section 5.3.

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "chapters/03_zero_fsdp/fsdp/flat_parameter.h"
#include "chapters/03_zero_fsdp/fsdp/wrap.h"
#include "comm/process_group.h"
#include "core/module.h"
#include "core/stream.h"

namespace shardbook::fsdp {

enum class ShardingStrategy {
  kFullShard,    ///< parameters are freed after forward and after backward
  kShardGradOp,  ///< freed after backward only (ZeRO-2's memory)
  kNoShard,      ///< DDP
  kHybridShard   ///< FULL_SHARD inside a node, replicas across nodes
};
/// When the next unit of backward is gathered: before this one computes, after
/// it, or when it is needed.
enum class BackwardPrefetch { kNone, kPre, kPost };

struct CpuOffload {
  /// Shards, their gradients and the optimizer live on the host.
  bool offload_params = false;
};

struct FsdpOptions {
  ShardingStrategy sharding_strategy = ShardingStrategy::kFullShard;
  /// HYBRID_SHARD: ranks of a node, which share one copy.
  int shard_size = 0;
  WrapPolicy auto_wrap_policy = {};
  CpuOffload cpu_offload = {};
  MixedPrecision mixed_precision = {};
  BackwardPrefetch backward_prefetch = BackwardPrefetch::kPre;
  /// The next unit of the last iteration is gathered before this one computes.
  bool forward_prefetch = false;
  /// Limits how far the host issues gathers ahead of the computation.
  bool limit_all_gathers = true;
  /// parameters() has one entry per parameter, so a unit may mix trained and
  /// frozen ones.
  bool use_orig_params = false;
  /// Begin with rank 0's values.
  bool sync_module_states = false;
  /// First iteration: check that all ranks gather the units in the same order.
  bool check_execution_order = true;
  /// FSDP v2 (fully_shard).
  bool per_parameter = false;

  /// Units are freed after forward, and gathered again for backward.
  bool gathers_again() const {
    return sharding_strategy == ShardingStrategy::kFullShard ||
           sharding_strategy == ShardingStrategy::kHybridShard;
  }
};

/// Returns f: gradients are divided by f before the sum and by d / f after it,
/// so neither addends nor sum overflow in 16 bits. For d = 8: 4, then 2. f is a
/// power of two: if d is one too, nothing is rounded.
double gradient_predivide_factor(int num_ranks);

class FullyShardedDataParallel;

/// While it lives, backward keeps whole gradients on this rank and sends none.
class [[nodiscard]] NoSync {
 public:
  explicit NoSync(FullyShardedDataParallel& fsdp);
  ~NoSync();
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  FullyShardedDataParallel& fsdp_;
  bool previous_;
};

/// While it lives, the model's parameters are whole, in the shards' dtype. At
/// its end each rank keeps its shard, with changes. A forward inside gathers
/// nothing, so one rank may run it alone. Collective. Costs the memory of the
/// whole model.
class [[nodiscard]] SummonFullParams {
 public:
  explicit SummonFullParams(FullyShardedDataParallel& fsdp,
                            bool writeback = true);
  ~SummonFullParams();
  SummonFullParams(const SummonFullParams&) = delete;
  SummonFullParams& operator=(const SummonFullParams&) = delete;

 private:
  FullyShardedDataParallel& fsdp_;
  const bool writeback_;
  Tensors full_;
};

class FullyShardedDataParallel {
 public:
  /// Units: the root, `plan`'s, and the policy's. Throws Error for parameters
  /// that belong to two units, for mixed dtypes, and for a shard size that does
  /// not divide the ranks.
  FullyShardedDataParallel(Module& module, ProcessGroup& group,
                           const FsdpOptions& options = {},
                           const WrapPlan& plan = {});
  ~FullyShardedDataParallel();
  FullyShardedDataParallel(const FullyShardedDataParallel&) = delete;
  FullyShardedDataParallel& operator=(const FullyShardedDataParallel&) = delete;

  Tensor operator()(const Tensor& x) { return module_(x); }
  Tensors operator()(const Tensors& inputs) { return module_(inputs); }

  NoSync no_sync() { return NoSync(*this); }
  SummonFullParams summon_full_params(bool writeback = true) {
    return SummonFullParams(*this, writeback);
  }
  /// The tensors that the optimizer updates on this rank.
  Tensors parameters() const;
  /// Drops all gradients: sharded ones, whole ones kept by no_sync, and remains
  /// of a failed backward.
  void clear_grad();
  /// Norm of the global gradient over all shards; scales them when it exceeds
  /// `max_norm`. An all-reduce of one f64. Use it in place of clip_grad_norm.
  double clip_grad_norm_(double max_norm);

  Module& module() { return module_; }
  ProcessGroup& group() { return group_; }
  const FsdpOptions& options() const { return options_; }
  /// In the order of definition.
  std::vector<const FlatParameter*> units() const;
  /// Whether units()[0] is the root's; the root has no unit when all parameters
  /// are in other units.
  bool root_has_parameters() const { return units_[0]->flat != nullptr; }
  /// Frees gathered units, for instance before shards are overwritten.
  void reshard_all();
  /// Bytes between host and device; not on the wire.
  zero::HostTraffic host_traffic() const;

 private:
  friend class NoSync;
  friend class SummonFullParams;

  struct Unit {
    Module* module = nullptr;
    bool is_root = false;
    /// BatchNorm under mixed precision: computes in its own dtype.
    bool keeps_dtype = false;
    std::unique_ptr<FlatParameter> flat;  ///< null: no parameters of its own
    std::vector<DType> input_dtypes;
    int calls = 0;          ///< forwards with an incomplete backward
    std::size_t begun = 0;  ///< place of the last forward in `begun_`
    std::vector<std::size_t> finished;  ///< places in `finished_`
    int awaited = 0;                    ///< of these, not reached by backward
  };

  void make_groups();
  void make_units(const WrapPlan& plan);
  /// The model's parameters become views of the units' arrays.
  void put_leaves_in_place();
  void convert_buffers();
  void broadcast_states();
  void hook(Unit& unit);

  void pre_forward(Unit& unit, Tensors& inputs);
  void post_forward(Unit& unit, Tensors& outputs);
  void pre_backward(Unit& unit, std::size_t nth);
  void post_backward(Unit& unit, std::size_t nth);
  void end_of_backward();
  void begin_orders();
  void backward_failed();
  void check_no_failure(const char* what) const;

  void cast_inputs(Unit& unit, Tensors& inputs);
  void watch_end(Unit& unit, std::size_t nth, Tensors& inputs);
  void unshard(Unit& unit);
  void reshard(Unit& unit);
  void prefetch_for_backward(const Unit& unit, std::size_t nth);
  void prefetch_for_forward(const Unit& unit);
  void reduce(Unit& unit);
  void finish_reduction();
  void check_order(const Unit& unit);
  bool frees_after_forward(const Unit& unit) const;

  Module& module_;
  ProcessGroup& group_;
  const FsdpOptions options_;
  std::shared_ptr<ProcessGroup> shard_group_, replica_group_;
  UnitGroups groups_;
  std::vector<std::unique_ptr<Unit>> units_;  // the root is first
  double divide_before_ = 1, divide_after_ = 1;

  bool is_syncing_ = true;
  bool is_first_iteration_ = true;
  bool is_in_backward_ = false;
  bool has_failed_ = false;  ///< a backward, since the last clear_grad
  bool is_summoned_ = false;
  /// Lives as long as a graph that backward may still walk through.
  std::weak_ptr<void> graph_;
  /// Units with parameters, in the order in which forwards began (now, and in
  /// the last iteration) and ended.
  std::vector<Unit*> begun_, last_begun_, finished_;
  Unit* reducing_ = nullptr;
  std::deque<Event> freed_;  ///< on the compute stream, one per freed unit
};

/// FSDP v2: `root` with these modules as units (PyTorch calls fully_shard on
/// each, and on the root last); a policy adds units. Every parameter is sharded
/// by itself, along dim 0:
///
///   auto model = fully_shard(gpt, {&gpt.h[0], &gpt.h[1]}, world);
///
/// A unit still sends one all-gather and one reduce-scatter; since each rank's
/// rows of every parameter travel together, they are copied into and out of the
/// message. The gain: optimizer state and state dicts per parameter, trained and
/// frozen parameters side by side, no padding between parameters of even rows.
/// Parameters with fewer rows than ranks leave some ranks without a part.
/// pytorch/pytorch, torch/distributed/fsdp/_fully_shard.
std::unique_ptr<FullyShardedDataParallel> fully_shard(
    Module& root, const std::vector<Module*>& modules, ProcessGroup& group,
    FsdpOptions options = {});

}  // namespace shardbook::fsdp
