#pragma once

// Work of a GPU that is recorded once and launched many times.
//
// The host hands a GPU one kernel after another and needs a few microseconds for
// each: a small kernel runs for less. A graph is a list of kernels that the GPU
// has as a whole. The host pays for one launch, whatever is in the graph:
//
//   Tensor y;                                            // all on cuda:0
//   const DeviceGraph graph([&] { y = gelu(matmul(x, w)); });
//   x.copy_from(batch), graph.launch();                  // y = f(batch)
//   x.copy_from(next), graph.launch();                   // y = f(next)
//
// A graph repeats kernels with the addresses and the numbers that they had when
// they were recorded. What the host did meanwhile, it does not repeat. So
//
// - the work may not draw random numbers, read values on the host, write values
//   from the host, or wait for anything: such an operation is refused by name;
// - run the work once before: libraries start, and plans are made, then;
// - new inputs are copied into the tensors that were there;
// - the memory that the work used stays with the graph as long as it lives. What
//   was freed during the recording may be used again within it, and by graphs
//   that share the memory; nobody else gets it. Peaks of the ledger are those of
//   the work: what was freed counts as cached between launches.
//
// One thread works with the device during a recording, on one stream.

#include <functional>
#include <memory>

namespace shardbook {

class DeviceGraph {
 public:
  /// Records what `work` gives to the current device, which is a GPU, on the
  /// current stream. Nothing of it runs before `launch`. Tensors that it makes
  /// are valid after a launch. With `shares_memory_with`, launches of both
  /// graphs overwrite each other's results, except those that are still held
  /// as tensors while the second is recorded. Throws Error with the operation
  /// that cannot be recorded, also where somebody observes operations.
  explicit DeviceGraph(const std::function<void()>& work,
                       const DeviceGraph* shares_memory_with = nullptr);

  /// Issues the work. Call it where the recording was: on its device and stream.
  void launch() const;

 private:
  struct State;
  std::shared_ptr<const State> state_;
};

}  // namespace shardbook
