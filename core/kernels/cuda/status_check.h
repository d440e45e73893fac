#pragma once

// CUDA's handles, and return codes of its runtime as errors.

#include <cuda_runtime.h>

#include "core/check.h"

namespace shardbook::kernels::cuda {

/// Handles that other headers pass as void*.
inline cudaStream_t stream_of(void* stream) {
  return static_cast<cudaStream_t>(stream);
}
inline cudaEvent_t event_of(void* event) {
  return static_cast<cudaEvent_t>(event);
}

/// SHARDBOOK_CUDA(cudaMalloc(&data, bytes), bytes, " bytes"): throws Error with
/// the call as it is written, the text after it, and CUDA's message. It clears
/// the error where CUDA can, so the next kernel is not blamed.
#define SHARDBOOK_CUDA(call, ...)                                              \
  do {                                                                         \
    const cudaError_t cuda_error_ = (call);                                    \
    if (cuda_error_ != cudaSuccess) (void)cudaGetLastError();                  \
    SB_CHECK(cuda_error_ == cudaSuccess, "CUDA: ", #call, " failed: ",         \
             cudaGetErrorString(cuda_error_) __VA_OPT__(, "; ") __VA_OPT__(, ) \
                 __VA_ARGS__);                                                 \
  } while (false)

}  // namespace shardbook::kernels::cuda
