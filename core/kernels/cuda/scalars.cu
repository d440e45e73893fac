// Kernels whose input or output is one value that stays on the device.

#include "core/kernels/cuda/kernel_launch.h"
#include "core/kernels/cuda/vector.h"
#include "core/kernels/elementwise.h"
#include "core/kernels/reduce.h"

namespace shardbook::kernels::cuda {

namespace {

// Blocks of the first pass; the second has one block.
constexpr int kPartialSums = kBlock;

/// Rounded once, as from_double on the CPU; floats to integers truncate.
template <typename T>
__device__ T from_double(double x) {
  if constexpr (std::is_same_v<T, double> || std::is_integral_v<T>) {
    return static_cast<T>(x);
  } else {
    return narrow<T>(static_cast<float>(x));
  }
}

template <typename T>
__global__ void repeat_kernel(std::int64_t n, double factor, const T* value,
                              T* x) {
  const T filler = from_double<T>(as_double(value[0]) * factor);
  for (std::int64_t i = first_index(); i < n; i += index_step()) x[i] = filler;
}

/// The sum over the block's threads, for thread 0.
__device__ double block_sum(double mine) {
  __shared__ SharedArray<double, kBlock> sums;
  const int thread = static_cast<int>(threadIdx.x);
  sums[thread] = mine;
  __syncthreads();
  for (int half = kBlock / 2; half > 0; half /= 2) {
    if (thread < half) sums[thread] = sums[thread] + sums[thread + half];
    __syncthreads();
  }
  return sums[0];
}

template <typename T>
__global__ void partial_sums_kernel(std::int64_t n, const T* x, bool aligned,
                                    double* partial) {
  constexpr int kCount = kLanes<T>;
  double mine = 0;
  for (std::int64_t i = first_index() * kCount; i < n;
       i += index_step() * kCount) {
    const AlignedVector<T, kCount> v =
        load_vector<kCount>(x + i, aligned, n - i);
    const std::int64_t count = n - i;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if (j < count) mine += as_double(v[j]);
    }
  }
  const double sum = block_sum(mine);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

template <typename T>
__global__ void total_kernel(int partials, const double* partial, double factor,
                             T* y) {
  const int thread = static_cast<int>(threadIdx.x);
  const double sum = block_sum(thread < partials ? partial[thread] : 0);
  if (thread == 0) y[0] = from_double<T>(factor * sum);
}

}  // namespace

void repeat(KernelContext& context, DType dtype, std::int64_t n, double factor,
            const void* value, void* x) {
  with_any("repeat", dtype, [&](auto zero) {
    using T = decltype(zero);
    launch(context, "repeat", blocks_for(n), kBlock, repeat_kernel<T>, n,
           factor, static_cast<const T*>(value), static_cast<T*>(x));
  });
}

void sum_all_into(KernelContext& context, DType dtype, std::int64_t n,
                  double factor, const void* x, void* y) {
  const Scratch partial(context, kPartialSums * sizeof(double));
  const dim3 blocks(std::min<unsigned>(kPartialSums, blocks_for(n).x));
  with_any("sum_all_into", dtype, [&](auto zero) {
    using T = decltype(zero);
    launch(context, "sum_all_into", blocks, kBlock, partial_sums_kernel<T>, n,
           static_cast<const T*>(x), is_aligned(kVectorBytes, x),
           partial.as<double>());
    launch(context, "sum_all_into", 1, kBlock, total_kernel<T>,
           static_cast<int>(blocks.x), partial.as<double>(), factor,
           static_cast<T*>(y));
  });
}

SHARDBOOK_CUDA_KERNEL(repeat);
SHARDBOOK_CUDA_KERNEL(sum_all_into);

}  // namespace shardbook::kernels::cuda
