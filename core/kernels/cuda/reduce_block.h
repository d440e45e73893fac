#pragma once

// Sums and maxima over the threads of a warp or of a block. Every thread gets
// the result. The order of additions is fixed, so results repeat bit for bit.

#include "core/kernels/cuda/kernel_launch.h"

namespace shardbook::kernels::cuda {

struct Sum {
  template <typename T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};

/// The larger value; NaN is larger than any number.
struct Max {
  template <typename T>
  __device__ T operator()(T a, T b) const {
    return b > a || b != b ? b : a;
  }
};

/// Joins the values of each group of `kCount` neighbouring lanes. All 32 threads
/// of the warp take part.
template <int kCount = kWarp, typename T, typename Join>
__device__ T join_lanes(T value, Join join) {
#pragma unroll
  for (int distance = kCount / 2; distance > 0; distance /= 2) {
    value = join(value, __shfl_xor_sync(kFullMask, value, distance));
  }
  return value;
}

/// All `kThreads` threads of the block take part: the function holds barriers.
/// `parts` may be the same array in consecutive calls.
template <int kThreads, typename T, typename Join>
__device__ T join_block(T value, Join join, SharedArray<T, 32>& parts) {
  constexpr int kWarps = kThreads / kWarp;
  static_assert(kThreads % kWarp == 0 && (kWarps & (kWarps - 1)) == 0);
  value = join_lanes(value, join);
  if constexpr (kWarps > 1) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    __syncthreads();  // The last call's parts have been read
    if (lane == 0) parts[warp] = value;
    __syncthreads();
    const T part = parts[lane % kWarps];
    value = join_lanes<kWarps>(part, join);
  }
  return value;
}

}  // namespace shardbook::kernels::cuda
