#pragma once

// ZeRO-3: parameters in shards as well.
//
//              fetch 0   fetch 1   fetch 2                 fetch 1   fetch 0
//   forward   | unit 0  | unit 1  | unit 2  | backward 2  | unit 1  | unit 0
//                release 0 ...     release 2   reduce 2     reduce 1 ...
//
// Every parameter is cut alone: rank r keeps slice r of each. A unit is a set
// of parameters that are fetched together: before a unit's forward, and again
// before its backward, one all-gather brings all slices of all its parameters.
// The result is ordered by rank, then by parameter, and is unpacked into the
// parameters:
//
//   gathered   a0 b0 c0 | a1 b1 c1 | a2 b2 c2      ->  a0 a1 a2, b0 b1 b2, ...
//
// Gradients go the same way back: each is divided by d and copied into a
// rank-major bucket as it comes; the last one of a unit sends the bucket into
// a reduce-scatter, and the unit's parameters are released.
//
// The parameters that a module's forward reads must belong to its unit, or to
// the unit of a module whose forward is running. Modules of `unit_types` are
// units, with everything below them. If there are any, all else belongs to the
// root; if not, each module with parameters of its own is a unit.
//
// The order of fetches is recorded in the first micro-step. From then on units
// are gathered ahead of their use, up to prefetch_bucket_size elements, while
// the ones before them compute. A micro-step in another order is recorded anew.
// A unit that is used again soon (max_reuse_distance) stays whole instead of
// being gathered twice, as far as max_live_parameters allows.
//
// Small parameters stay gathered and are refreshed after each step; their
// gradients and optimizer state are still sharded.
//
// DeepSpeed, deepspeed/runtime/zero/{stage3,partition_parameters,
// partitioned_param_coordinator}.py and comm/coalesced_collectives.py.

#include <memory>

#include "chapters/03_zero_fsdp/zero/fetches.h"
#include "chapters/03_zero_fsdp/zero/zero.h"
#include "core/stream.h"

namespace shardbook::zero {

/// A module and the parameters that are fetched with it.
struct UnitPlan {
  std::string name;  ///< path of the module; "" is the root
  Module* module = nullptr;
  std::vector<NamedTensor> parameters;
};
/// Units in the order of definition; every parameter is in exactly one.
std::vector<UnitPlan> plan_units(Module& module,
                                 const std::vector<std::string>& unit_types);

class ZeroStage3 : public ZeroOptimizer {
 public:
  ZeroStage3(Module& module, ProcessGroup& group, const ZeroOptions& options);
  ~ZeroStage3() override;

  /// Exact if every unit runs once per forward and in every backward.
  double predicted_bytes(std::int64_t steps,
                         std::int64_t micro_steps) const override;
  double published_bytes() const override { return persistent_bytes(true); }

 private:
  struct Slot {
    Tensor parameter;
    std::size_t group = 0;
    std::int64_t offset = 0;  ///< of the slice in the shard
    std::int64_t slice = 0;   ///< elements of a slice
    bool is_trained = true;
    bool is_persistent = false;
    Tensor full;  ///< [d * slice]; the parameter is a view of its beginning
    int hook_key = 0;
    bool has_gradient = false;  ///< copied into the unit's bucket
    std::int64_t bucket_offset = 0;
  };
  /// Parameters of one module and one dtype.
  struct Unit {
    std::size_t index = 0;  ///< among the units
    std::string name;
    Module* module = nullptr;
    DType dtype = DType::kF32;
    std::vector<Slot> slots;
    std::int64_t numel = 0;         ///< gathered elements of a fetch
    std::int64_t bucket_slice = 0;  ///< elements of a rank in the bucket
    Tensor gathered;                ///< while in flight
    Work work;
    Tensor bucket;  ///< gradients, until the reduction is done
    Tensor sent;    ///< the bucket, or its copy for the wire
    Work reduction;
    int num_missing = 0;
    int num_reduced = 0;  ///< since the gradients were forgotten
  };

  void make_groups();
  void make_units();
  void partition(Slot& slot);
  void add_hooks();

  void begin_forward();
  void after_forward(Unit& unit, const Tensors& outputs);
  void begin_backward();
  void end_of_backward();

  void start_gather(Unit& unit);
  void finish_gather(Unit& unit);
  void release(Unit& unit);
  void end_use(const Unit& unit);
  std::vector<std::int64_t> unit_numels() const;
  static std::vector<Slot*> fetched_slots(Unit& unit);
  Work gather(const std::vector<Slot*>& slots, Tensor& buffer,
              const std::string& label);
  void unpack(const std::vector<Slot*>& slots, const Tensor& buffer);

  void on_gradient(Unit& unit, Slot& slot);
  void copy_into_bucket(Unit& unit, Slot& slot);
  void reduce(Unit& unit);
  void finish_reduction();

  // --- The bill
  double time_of(const textbook::ModelTimes& model, std::int64_t steps,
                 std::int64_t micro_steps, const Sums& sums) const override;
  /// Of the unit's fetched parameters, padded.
  double full_bytes(const Unit& unit) const;
  /// Of its gradients on the wire.
  double reduced_bytes(const Unit& unit) const;
  /// By unit: the number of gathers in each micro-step after the first; 1 if it
  /// is kept from forward to backward.
  std::vector<int> later_gathers() const;
  /// Bytes of the parameters that stay gathered, padded.
  double persistent_bytes(bool with_frozen) const;

  void finish_gradients() override;
  void publish(bool with_frozen) override;
  void clear_gradients() override;

  std::vector<std::unique_ptr<Unit>> units_;
  /// By group: the shards that gathers read: shards of `groups_`, or copies on
  /// the device when only the optimizer is offloaded.
  Tensors gather_shards_;
  std::unique_ptr<Fetches> fetches_;
  Unit* reducing_ = nullptr;
  int num_accumulated_ = 0;
  Event updated_;  ///< the shards hold the parameters of this step
  /// Hooks of the modules outlive this object and look here first.
  std::shared_ptr<ZeroStage3*> self_;
};

}  // namespace shardbook::zero
