#pragma once

// The state that a rank carries with it.
//
// `RankContext` holds ALL state of one rank: its device, whether gradients are
// recorded, random streams, kernels' caches, observers. It is the only
// thread-local of the book: a thread (or fiber) installs a context, and
// everything it calls finds it through `RankContext::current()`.
//
//   RankContext context(Device::cpu(3), /*rank=*/3);
//   RankContext::Scope scope(context);
//   Tensor x = Tensor::zeros({2, 2});          // on cpu:3
//
// A thread that installs none gets a context of its own on a device "cpu:0".
// A context is used by one thread at a time.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/device.h"
#include "core/dtype.h"

namespace shardbook {

class KernelContext;
class WeightGradients;
namespace autograd {
class GraphTask;
}

/// Which part of a training step is running.
enum class Phase { kForward, kBackward, kOptimizer };
const char* phase_name(Phase phase);

/// Sizes of a product: `batch` times [m, k] x [k, n]. Attention: m queries, n
/// keys and k elements per head, in `batch` heads. All 0 for other operations.
struct ProductShape {
  std::int64_t m = 0, n = 0, k = 0;
  std::int64_t batch = 1;
};

/// One operation of core: what an ideal device would have to do.
struct OpEvent {
  const char* name;  ///< "matmul", "gelu", ...
  double flops;      ///< floating-point operations
  double bytes;      ///< read plus written, each operand once
  Phase phase;
  Device device;
  DType dtype = DType::kF32;
  ProductShape product;
  /// Queue of the device that it runs on.
  int stream = 0;
  /// A copy between devices: where the data come from; otherwise undefined.
  Device source;
};

/// The memory of `kind` in use on `device` has grown by `bytes`; negative when
/// it has shrunk.
struct AllocationEvent {
  Device device;
  MemoryKind kind;
  std::int64_t bytes;
};

/// When an event was recorded, for an observer that keeps a clock.
struct EventTime {
  double s = 0;
  int epoch = 0;  ///< restarts of the clock before it
};

/// Sees every operation and every allocation of the ranks that it watches.
/// One that watches several contexts must be safe to call from their threads.
/// Callbacks must not throw.
class Observer {
 public:
  virtual ~Observer() = default;
  virtual void on_op_begin(const OpEvent& event) {}
  virtual void on_op_end(const OpEvent& event) {}
  virtual void on_allocation(const AllocationEvent& event) {}
  // Ordering of streams, see core/stream.h. An observer that keeps a clock
  // stores the event's time in `time`.
  virtual void on_event_record(int stream, EventTime& time) {}
  virtual void on_event_wait(int stream, const EventTime& time) {}
  virtual void on_event_synchronize(const EventTime& time) {}
  /// The host reads a value of `device`, and waits for all that was issued.
  virtual void on_host_read(const Device& device) {}
};

/// Where this rank's rows lie in the global batch: local row i is global row
/// first + i * stride. Dropout masks are drawn at global positions.
struct BatchSlice {
  std::int64_t first = 0;
  std::int64_t stride = 1;
};

/// Position in the random streams. Saved and restored as a whole, which is
/// what recomputation needs.
struct RandomState {
  std::uint64_t seed = 0;
  std::uint64_t step = 0;
  /// Counts the random operations of one forward pass: "the layer".
  std::uint64_t next_op = 0;
  BatchSlice batch;
};

/// A rank's settings that move with its work to another thread.
struct RankSettings {
  int rank = 0;
  bool grad_enabled = true;
  /// Fixed summation order, on the CPU whatever the shape; for proofs, not for
  /// speed.
  bool deterministic = false;
  /// CUDA: products of f32 may round their operands to TF32.
  bool allow_tf32 = false;
  /// True while recomputation runs a forward a second time.
  bool is_recomputing = false;
  MemoryKind memory_kind = MemoryKind::kActivation;
  Phase phase = Phase::kForward;
  RandomState random;

  /// Copies of the settings own the observer too: work that was given to another
  /// thread before the removal still finds it.
  void add_observer(std::shared_ptr<Observer> observer);
  void remove_observer(const std::shared_ptr<Observer>& observer);
  bool observed() const { return !observers_.empty(); }
  const std::vector<std::shared_ptr<Observer>>& observers() const {
    return observers_;
  }

 protected:
  std::vector<std::shared_ptr<Observer>> observers_;
};

class RankContext : public RankSettings {
 public:
  /// `num_threads`: cores for one operation; 0 leaves the runtime's setting.
  explicit RankContext(Device device = Device::cpu(0), int rank = 0,
                       int num_threads = 0);
  ~RankContext();
  RankContext(const RankContext&) = delete;
  RankContext& operator=(const RankContext&) = delete;

  /// The context of the calling thread.
  static RankContext& current();
  /// The same, or null where the thread has none yet.
  static RankContext* installed();
  /// Installs `context` (null for none) and returns what was installed: for
  /// fibers, which take turns on one thread.
  static RankContext* exchange(RankContext* context);

  /// Installs a context on this thread for the lifetime of the scope.
  class Scope {
   public:
    explicit Scope(RankContext& context);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    RankContext* previous_;
    int previous_threads_;
  };

  /// A context for another thread that works for this rank on `device` (a
  /// replica of DataParallel, a device's share of a backward). Made once per
  /// device and kept; settings are copied from this context at each call.
  RankContext& worker(const Device& device);

  void notify_op_begin(const OpEvent& event);
  void notify_op_end(const OpEvent& event);
  void notify_allocation(const AllocationEvent& event);

  /// The host's memory, for offloaded tensors: a device named "host", created
  /// at the first call, which has shapes only if this device is meta. Copies
  /// between it and a CUDA device are complete when they return.
  const Device& host();

  /// What kernels on tensors of `device` need: caches, scratch memory of that
  /// device, and the current stream. A rank on CUDA also computes on the host.
  KernelContext& kernels(const Device& device);

  Device device;
  int num_threads = 0;
  /// Queue of the device that work is issued to; see core/stream.h.
  int stream = 0;
  /// False once a loss of the running step was infinite or NaN.
  bool losses_are_finite = true;
  /// The store for weight gradients that can wait, or null; see
  /// core/weight_gradients.h.
  WeightGradients* weight_gradients = nullptr;
  /// The backward that runs on this thread, if one does.
  autograd::GraphTask* graph_task = nullptr;

 private:
  struct Kernels;
  Kernels& kernels_of(const Device& device);

  Device host_;
  /// One context for all host memory, and one per CUDA device.
  std::vector<std::unique_ptr<Kernels>> kernels_;
  std::vector<std::pair<Device, std::unique_ptr<RankContext>>> workers_;
};

/// Cores one operation may use on this thread.
int num_threads();

/// Sets one member of the current context for a scope.
template <typename T>
class ContextValue {
 public:
  ContextValue(T RankContext::*member, T value)
      : context_(RankContext::current()),
        member_(member),
        previous_(context_.*member) {
    context_.*member = std::move(value);
  }
  ~ContextValue() { context_.*member_ = previous_; }
  ContextValue(const ContextValue&) = delete;
  ContextValue& operator=(const ContextValue&) = delete;

 private:
  RankContext& context_;
  T RankContext::*member_;
  T previous_;
};

/// Allocations inside the scope are booked as `kind`.
class MemoryScope : public ContextValue<MemoryKind> {
 public:
  explicit MemoryScope(MemoryKind kind)
      : ContextValue(&RankContext::memory_kind, kind) {}
};

/// Nothing inside the scope is recorded for backward.
class NoGrad : public ContextValue<bool> {
 public:
  NoGrad() : ContextValue(&RankContext::grad_enabled, false) {}
};

/// Everything inside the scope sums in a fixed order.
class Deterministic : public ContextValue<bool> {
 public:
  explicit Deterministic(bool on = true)
      : ContextValue(&RankContext::deterministic, on) {}
};

class PhaseScope : public ContextValue<Phase> {
 public:
  explicit PhaseScope(Phase phase) : ContextValue(&RankContext::phase, phase) {}
};

}  // namespace shardbook
