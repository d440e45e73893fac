#pragma once

// GPU work that is recorded once and launched many times.
//
// The host hands a GPU one kernel after another and needs a few microseconds
// for each: a small kernel runs for less. A graph is a list of kernels that the
// GPU gets as a whole. The host pays for one launch, whatever is in the graph:
//
//   Tensor y;                                            // all on cuda:0
//   const DeviceGraph graph([&] { y = gelu(matmul(x, w)); });
//   x.copy_from(batch), graph.launch();                  // y = f(batch)
//   x.copy_from(next), graph.launch();                   // y = f(next)
//
// A graph repeats kernels with the addresses and the numbers that they had when
// they were recorded. It does not repeat what the host did meanwhile. So
//
// - the work may not draw random numbers, read values on the host, write values
//   from the host, or wait for anything: such an operation is refused by name;
// - run the work once before, which starts libraries and makes plans;
// - new inputs are copied into the tensors that were there;
// - the memory that the work used stays with the graph as long as it lives.
//   Memory freed during the recording may be reused within it, and by graphs
//   that share the memory, but by nothing else. The ledger shows the work's
//   peaks: freed memory counts as cached between launches.
//
// One thread works with the device during a recording, on one stream.

#include <functional>
#include <memory>

namespace shardbook {

class DeviceGraph {
 public:
  /// Records what `work` issues to the current device, a GPU, on the current
  /// stream. Nothing of it runs before `launch`; its new tensors are valid
  /// after a launch. With `shares_memory_with`, launches of both graphs
  /// overwrite each other's results, except those that are still held as
  /// tensors while the second is recorded. Throws Error with the operation that
  /// cannot be recorded, and while operations are observed.
  explicit DeviceGraph(const std::function<void()>& work,
                       const DeviceGraph* shares_memory_with = nullptr);

  /// Issues the work. Call it where the recording was: on its device and stream.
  void launch() const;

 private:
  struct State;
  std::shared_ptr<const State> state_;
};

}  // namespace shardbook
