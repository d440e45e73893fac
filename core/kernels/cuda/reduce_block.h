#pragma once

// Sums and maxima over the threads of a warp or of a block. Every thread gets
// the result. The order of additions is fixed, so results repeat bit for bit.

#include "core/kernels/cuda/kernel_launch.h"
#include "core/kernels/cuda/vector.h"

namespace shardbook::kernels::cuda {

/// All 32 threads of the warp take part.
template <typename T>
__device__ T warp_sum(T value) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kFullMask, value, distance);
  }
  return value;
}

/// The larger value; NaN is larger than any number.
template <typename T>
__device__ T max_or_nan(T a, T b) {
  return b > a || b != b ? b : a;
}

template <typename T>
__device__ T warp_max(T value) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    value = max_or_nan(value, __shfl_xor_sync(kFullMask, value, distance));
  }
  return value;
}

/// All `kThreads` threads of the block take part: the functions below hold
/// barriers. `parts` may be the same array in consecutive calls.
template <int kThreads, typename T>
__device__ T block_sum(T value, SharedArray<T, 32>& parts) {
  static_assert(kThreads % kWarp == 0 && kThreads <= kWarp * kWarp);
  value = warp_sum(value);
  if constexpr (kThreads > kWarp) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    __syncthreads();  // The last call's parts have been read
    if (lane == 0) parts[warp] = value;
    __syncthreads();
    value = warp_sum(lane < kThreads / kWarp ? parts[lane] : T(0));
  }
  return value;
}

template <int kThreads, typename T>
__device__ T block_max(T value, SharedArray<T, 32>& parts) {
  static_assert(kThreads % kWarp == 0 && kThreads <= kWarp * kWarp);
  value = warp_max(value);
  if constexpr (kThreads > kWarp) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    __syncthreads();
    if (lane == 0) parts[warp] = value;
    __syncthreads();
    const T part = parts[lane < kThreads / kWarp ? lane : 0];
    value = warp_max(part);
  }
  return value;
}

}  // namespace shardbook::kernels::cuda
