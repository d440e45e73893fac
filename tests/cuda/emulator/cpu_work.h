#pragma once

// A kernel of the CPU as work on a stream of the emulated device.

#include <cuda_runtime.h>

#include <functional>
#include <utility>

#include "core/kernels/kernel_context.h"

namespace emulator {

/// Runs `work` with a context of the CPU. What it throws becomes the error of
/// the call that waits for it.
inline void run_on_cpu(shardbook::KernelContext& context, const char* name,
                       std::function<void(shardbook::KernelContext&)> work) {
  const auto stream = static_cast<cudaStream_t>(context.stream);
  const bool deterministic = context.deterministic;
  enqueue(stream, name, [work = std::move(work), deterministic] {
    shardbook::KernelContext cpu;
    cpu.deterministic = deterministic;
    work(cpu);
    return true;
  });
}

}  // namespace emulator
