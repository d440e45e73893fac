// Sums, maxima and minima over arrays of several ranks. Each thread owns a
// vector of elements and reads it from every input in order, so the result
// depends on the order of inputs only.

#include "core/kernels/combine.h"

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "core/kernels/cuda/kernel_launch.h"
#include "core/kernels/cuda/vector.h"

namespace shardbook::kernels::cuda {

namespace {

// Arrays that one launch reads, and that one launch writes.
constexpr int kMostArrays = 16;

template <typename T>
struct Arrays {
  int count = 0;
  T* arrays[kMostArrays] = {};
};

// Integers add without sign: an overflow wraps.
template <typename S>
__device__ S combine_two(ReduceKind op, S a, S b) {
  switch (op) {
    case ReduceKind::kSum:
      if constexpr (std::is_integral_v<S>) {
        using Unsigned = std::make_unsigned_t<S>;
        return static_cast<S>(static_cast<Unsigned>(a) +
                              static_cast<Unsigned>(b));
      } else {
        return a + b;
      }
    case ReduceKind::kMax:
      return a < b ? b : a;
    default:
      return b < a ? b : a;
  }
}

// Combines N elements from i on. `sums` holds earlier launches' result when
// `continues`, and receives this one's when there are no outputs.
template <int N, typename T>
__device__ void combine_elements(ReduceKind op, std::int64_t i, bool continues,
                                 Compute<T>* sums,
                                 const Arrays<const T>& inputs,
                                 const Arrays<T>& outputs) {
  using S = Compute<T>;
  S result[N] = {};
  if (continues) {
#pragma unroll
    for (int j = 0; j < N; ++j) result[j] = sums[i + j];
  }
#pragma unroll 4
  for (int k = 0; k < inputs.count; ++k) {
    const AlignedVector<T, N> v = load_vector<N>(inputs.arrays[k] + i);
    const bool is_first = k == 0 && !continues;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      result[j] =
          is_first ? widen(v[j]) : combine_two(op, result[j], widen(v[j]));
    }
  }
  if (sums != nullptr && inputs.count > 0) {
#pragma unroll
    for (int j = 0; j < N; ++j) sums[i + j] = result[j];
  }
  AlignedVector<T, N> out;
#pragma unroll
  for (int j = 0; j < N; ++j) out[j] = narrow<T>(result[j]);
  for (int k = 0; k < outputs.count; ++k) {
    store_vector(outputs.arrays[k] + i, out);
  }
}

template <int N, typename T>
__global__ void combine_kernel(ReduceKind op, std::int64_t n,
                               std::int64_t vectors, bool continues,
                               Compute<T>* sums, Arrays<const T> inputs,
                               Arrays<T> outputs) {
  for (std::int64_t i = first_index(); i < vectors; i += index_step()) {
    combine_elements<N>(op, i * N, continues, sums, inputs, outputs);
  }
  for (std::int64_t i = vectors * N + first_index(); i < n; i += index_step()) {
    combine_elements<1>(op, i, continues, sums, inputs, outputs);
  }
}

// The arrays from `first` on, as many as fit.
template <typename T, typename Pointer>
Arrays<T> take(const std::vector<Pointer>& all, std::size_t first) {
  Arrays<T> arrays;
  for (std::size_t k = first; k < all.size() && arrays.count < kMostArrays;
       ++k) {
    arrays.arrays[arrays.count++] = static_cast<T*>(all[k]);
  }
  return arrays;
}

template <typename T>
void combine_typed(KernelContext& context, ReduceKind op, std::int64_t n,
                   const std::vector<const void*>& inputs,
                   const std::vector<void*>& outputs) {
  constexpr int N = kLanes<T>;
  bool aligned = true;
  for (const void* array : inputs) aligned &= is_aligned(kVectorBytes, array);
  for (const void* array : outputs) aligned &= is_aligned(kVectorBytes, array);
  const std::int64_t vectors = aligned ? n / N : 0;
  const dim3 grid = blocks_for(std::max(vectors, n - vectors * N));

  // More arrays than one launch takes: the sums wait in scratch, unrounded, and
  // nothing is written before every input has been read.
  const bool is_long =
      inputs.size() > kMostArrays || outputs.size() > kMostArrays;
  Scratch scratch(context, is_long ? n * sizeof(Compute<T>) : 0);
  auto* const sums = scratch.as<Compute<T>>();
  const auto run = [&](bool continues, const Arrays<const T>& from,
                       const Arrays<T>& to) {
    launch(context, "combine", grid, kBlock, combine_kernel<N, T>, op, n,
           vectors, continues, sums, from, to);
  };
  if (!is_long)
    return run(false, take<const T>(inputs, 0), take<T>(outputs, 0));
  for (std::size_t k = 0; k < inputs.size(); k += kMostArrays) {
    run(k > 0, take<const T>(inputs, k), {});
  }
  for (std::size_t k = 0; k < outputs.size(); k += kMostArrays) {
    run(true, {}, take<T>(outputs, k));
  }
}

}  // namespace

void combine(KernelContext& context, DType dtype, ReduceKind op, std::int64_t n,
             const std::vector<const void*>& inputs,
             const std::vector<void*>& outputs) {
  SB_CHECK(!inputs.empty(), "combine: no inputs; at least 1");
  with_any("combine", dtype, [&](auto zero) {
    combine_typed<decltype(zero)>(context, op, n, inputs, outputs);
  });
}

SHARDBOOK_CUDA_KERNEL(combine);

}  // namespace shardbook::kernels::cuda
