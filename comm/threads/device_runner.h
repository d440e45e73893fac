#pragma once

// Calls of thread ranks whose tensors lie on GPUs.
//
// A rank's buffers are complete when it arrives in a call: it has waited, on
// the host, for all work on its current stream. The thread that starts the call
// then runs its pieces, as copies and as the kernel `combine`, on a stream of
// the runner, and waits for that stream before the call is done. So nothing
// needs events, every rank may be a thread with a stream of its own on one GPU,
// and sums have the bits that they have on the CPU. Each call costs two waits
// of the host; the backend exists to run every chapter with several ranks on
// one GPU, and ranks with a GPU each have backend nccl.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "comm/process_group.h"
#include "core/internal/device_runtime.h"
#include "core/kernels/kernel_context.h"

namespace shardbook::internal {

/// Runs on one GPU. One call at a time.
class DeviceRunner {
 public:
  explicit DeviceRunner(int gpu);
  ~DeviceRunner();
  DeviceRunner(const DeviceRunner&) = delete;
  DeviceRunner& operator=(const DeviceRunner&) = delete;

  /// Held for the whole of a call.
  std::mutex mutex;
  /// Makes the GPU the calling thread's device.
  void begin() { runtime_.use(gpu_); }
  void copy(void* to, const void* from, std::size_t bytes) {
    runtime_.copy(to, from, bytes, stream_);
  }
  /// output[i] = op over the inputs, for each output. `is_near`: all of them lie
  /// on this GPU; otherwise they go through blocks of its memory.
  void combine(DType dtype, ReduceOp op, const std::vector<const void*>& inputs,
               const std::vector<void*>& outputs, std::int64_t count,
               bool is_near);
  /// Returns when all copies and kernels have run.
  void finish();

 private:
  /// Scratch memory of kernels, which goes back when they have run.
  struct KernelScratch : ScratchProvider {
    explicit KernelScratch(DeviceRuntime& runtime) : runtime(runtime) {}
    ~KernelScratch() override;
    void* acquire(std::size_t bytes) override;
    void release(void* pointer) override { released.push_back(pointer); }
    /// The caller has waited for the stream.
    void free_released();
    DeviceRuntime& runtime;
    std::vector<void*> released;
  };
  void* block(std::size_t bytes);

  const int gpu_;
  DeviceRuntime& runtime_;
  void* stream_ = nullptr;
  KernelScratch scratch_;
  KernelContext kernels_;
  void* block_ = nullptr;
  std::size_t block_bytes_ = 0;
};

}  // namespace shardbook::internal
