#pragma once

// y[i] = fn(x[i]) for every i. `fn` is a small struct with a __device__
// operator(), passed by value. Each thread owns whole vectors, a grid apart;
// what is left over at the end, or everything where a pointer is not aligned,
// goes element by element.

#include <algorithm>
#include <cstdint>

#include "core/kernels/cuda/kernel_launch.h"
#include "core/kernels/cuda/vector.h"

namespace shardbook::kernels::cuda {

template <int N, typename In, typename Out, typename Fn>
__global__ void map_kernel(std::int64_t n, std::int64_t vectors, const In* x,
                           Out* y, Fn fn) {
  for (std::int64_t i = first_index(); i < vectors; i += index_step()) {
    const AlignedVector<In, N> in = load_vector<N>(x + i * N);
    AlignedVector<Out, N> out;
#pragma unroll
    for (int j = 0; j < N; ++j) out[j] = fn(in[j]);
    store_vector(y + i * N, out);
  }
  for (std::int64_t i = vectors * N + first_index(); i < n; i += index_step()) {
    y[i] = fn(x[i]);
  }
}

template <int N, typename In, typename Out, typename Fn>
__global__ void map2_kernel(std::int64_t n, std::int64_t vectors, const In* a,
                            const In* b, Out* y, Fn fn) {
  for (std::int64_t i = first_index(); i < vectors; i += index_step()) {
    const AlignedVector<In, N> in_a = load_vector<N>(a + i * N);
    const AlignedVector<In, N> in_b = load_vector<N>(b + i * N);
    AlignedVector<Out, N> out;
#pragma unroll
    for (int j = 0; j < N; ++j) out[j] = fn(in_a[j], in_b[j]);
    store_vector(y + i * N, out);
  }
  for (std::int64_t i = vectors * N + first_index(); i < n; i += index_step()) {
    y[i] = fn(a[i], b[i]);
  }
}

/// The largest type decides how many elements a vector holds.
template <typename In, typename Out>
constexpr int kMapLanes = std::min(kLanes<In>, kLanes<Out>);

/// y[i] = fn(x[i]) for i < n; y may be x.
template <typename In, typename Out, typename Fn>
void map(KernelContext& context, const char* name, std::int64_t n, const In* x,
         Out* y, Fn fn) {
  constexpr int N = kMapLanes<In, Out>;
  const bool aligned =
      is_aligned(N * sizeof(In), x) && is_aligned(N * sizeof(Out), y);
  const std::int64_t vectors = aligned ? n / N : 0;
  launch(context, name, blocks_for(std::max(vectors, n - vectors * N)), kBlock,
         map_kernel<N, In, Out, Fn>, n, vectors, x, y, fn);
}

/// y[i] = fn(a[i], b[i]) for i < n; y may be a or b.
template <typename In, typename Out, typename Fn>
void map(KernelContext& context, const char* name, std::int64_t n, const In* a,
         const In* b, Out* y, Fn fn) {
  constexpr int N = kMapLanes<In, Out>;
  const bool aligned =
      is_aligned(N * sizeof(In), a, b) && is_aligned(N * sizeof(Out), y);
  const std::int64_t vectors = aligned ? n / N : 0;
  launch(context, name, blocks_for(std::max(vectors, n - vectors * N)), kBlock,
         map2_kernel<N, In, Out, Fn>, n, vectors, a, b, y, fn);
}

}  // namespace shardbook::kernels::cuda
