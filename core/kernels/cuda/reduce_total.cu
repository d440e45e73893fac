// Reductions to one number, in f64: blocks first, then their results. Which
// thread takes which elements depends on their number only.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "core/kernels/cuda/device_state.h"
#include "core/kernels/cuda/reduce_block.h"
#include "core/kernels/cuda/vector.h"
#include "core/kernels/reduce.h"

namespace shardbook::kernels::cuda {

namespace {

constexpr std::int64_t kMostBlocks = 1024;

enum class Total { kSquares, kMaxDifference };

template <Total kTotal>
using JoinOf = std::conditional_t<kTotal == Total::kMaxDifference, Max, Sum>;

// The contribution of one element; `b` is for differences.
template <Total kTotal, typename T>
__device__ double term(T a, T b) {
  const double u = as_double(a);
  if constexpr (kTotal == Total::kSquares) return u * u;
  const double v = as_double(b);
  return u == v ? 0.0 : std::fabs(u - v);
}

// partial[block] = the total of the block's vectors, a grid apart.
template <Total kTotal, typename T>
__global__ void total_kernel(std::int64_t n, const T* a, const T* b,
                             bool aligned, double* partial) {
  constexpr int N = kLanes<T>;
  __shared__ SharedArray<double, 32> parts;
  double result = 0.0;
#pragma unroll 2
  for (std::int64_t i = first_index() * N; i < n; i += index_step() * N) {
    const AlignedVector<T, N> v = load_vector<N>(a + i, aligned, n - i);
    AlignedVector<T, N> w = v;
    if constexpr (kTotal == Total::kMaxDifference) {
      w = load_vector<N>(b + i, aligned, n - i);
    }
#pragma unroll
    for (int j = 0; j < N; ++j) {
      // Zeros behind the end contribute 0
      result = JoinOf<kTotal>()(result, term<kTotal>(v[j], w[j]));
    }
  }
  result = join_block<kBlock>(result, JoinOf<kTotal>(), parts);
  if (threadIdx.x == 0) partial[blockIdx.x] = result;
}

template <Total kTotal>
__global__ void total_of_parts_kernel(int count, const double* partial,
                                      double* out) {
  __shared__ SharedArray<double, 32> parts;
  double result = 0.0;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kBlock) {
    result = JoinOf<kTotal>()(result, partial[i]);
  }
  result = join_block<kBlock>(result, JoinOf<kTotal>(), parts);
  if (threadIdx.x == 0) *out = result;
}

template <Total kTotal, typename T>
double total(KernelContext& context, const char* name, std::int64_t n,
             const void* a, const void* b) {
  if (n == 0) return 0.0;
  const std::int64_t per_block = kBlock * kLanes<T>;
  const std::int64_t blocks = std::min(kMostBlocks, ceil_div(n, 2 * per_block));
  Scratch scratch(context, (blocks + 1) * sizeof(double));
  double* const partial = scratch.as<double>();
  double* const out = partial + blocks;
  launch(context, name, blocks_of(blocks), kBlock, total_kernel<kTotal, T>, n,
         static_cast<const T*>(a), static_cast<const T*>(b),
         is_aligned(kVectorBytes, a, b), partial);
  launch(context, name, 1, kBlock, total_of_parts_kernel<kTotal>,
         static_cast<int>(blocks), partial, out);
  double result = 0.0;
  read_result(context, &result, out, sizeof(result));
  return result;
}

}  // namespace

double sum_squares(KernelContext& context, DType dtype, std::int64_t n,
                   const void* x) {
  double result = 0.0;
  with_floating("sum_squares", dtype, [&](auto zero) {
    result =
        total<Total::kSquares, decltype(zero)>(context, "sum_squares", n, x, x);
  });
  return result;
}

double max_abs_difference(KernelContext& context, DType dtype, std::int64_t n,
                          const void* a, const void* b) {
  double result = 0.0;
  with_any("max_abs_difference", dtype, [&](auto zero) {
    result = total<Total::kMaxDifference, decltype(zero)>(
        context, "max_abs_difference", n, a, b);
  });
  return result;
}

SHARDBOOK_CUDA_KERNEL(sum_squares);
SHARDBOOK_CUDA_KERNEL(max_abs_difference);

}  // namespace shardbook::kernels::cuda
