#pragma once

// State of one rank's kernels between calls.

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/kernels/kernel_context.h"

namespace shardbook::kernels::cuda {

/// An error that a kernel found in its input. It lies in host memory that the
/// device writes to; the host checks it whenever it waits for other reasons.
struct DeviceError {
  enum Code : int { kNone = 0, kIndexOutside, kTargetOutside, kDivisionByZero };
  int code = kNone;  ///< a Code; atomics want an int
  /// The offending value, and the range [first, last) that is allowed.
  long long value = 0, first = 0, last = 0;
};

/// Handles, plans and the error slot; lives in KernelContext::cuda_state.
/// Libraries keep their objects in members of their own (matmul, conv).
struct CudaState {
  CudaState();
  ~CudaState();
  CudaState(const CudaState&) = delete;
  CudaState& operator=(const CudaState&) = delete;

  /// Pinned and mapped: the same address on host and device.
  DeviceError* error = nullptr;
  /// 64 bytes of pinned memory, for results that the host reads.
  void* result = nullptr;
  std::shared_ptr<void> matmul, conv;
};

/// The context's state, made at the first call.
CudaState& cuda_state(KernelContext& context);

/// Throws Error, with the reason, while a graph records the context's stream.
void refuse_capture(const KernelContext& context, const char* why);

/// Copies `bytes` (at most 64) of the device to the host in the order of the
/// context's stream, waits, and throws the error that a kernel has found.
void read_result(KernelContext& context, void* to, const void* from,
                 std::size_t bytes);

/// "cuDNN 9.14": a library's name and version, for `doctor`. The file that uses
/// the library adds its own while it is loaded.
using VersionText = std::string (*)();
std::vector<VersionText>& library_versions();

#if defined(__CUDACC__) || defined(SHARDBOOK_CUDA_EMULATOR)
/// Remembers the first error only.
__device__ inline void report(DeviceError* error, DeviceError::Code code,
                              long long value, long long first,
                              long long last) {
  if (atomicCAS(&error->code, DeviceError::kNone, static_cast<int>(code)) ==
      DeviceError::kNone) {
    error->value = value, error->first = first, error->last = last;
  }
}
#endif

}  // namespace shardbook::kernels::cuda
