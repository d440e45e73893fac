#pragma once

// y[i] = fn(x[i]) for every i. `fn` is a small struct with a __device__
// operator(), passed by value. Each thread owns whole vectors, a grid apart;
// the rest at the end, or everything where a pointer is not aligned, is done
// element by element.

#include <algorithm>
#include <cstdint>

#include "core/kernels/cuda/kernel_launch.h"
#include "core/kernels/cuda/vector.h"

namespace shardbook::kernels::cuda {

template <typename Out, int N, typename Fn, typename... In>
__device__ AlignedVector<Out, N> map_vectors(
    Fn fn, const AlignedVector<In, N>&... inputs) {
  AlignedVector<Out, N> out;
#pragma unroll
  for (int j = 0; j < N; ++j) out[j] = fn(inputs[j]...);
  return out;
}

template <int N, typename Fn, typename Out, typename... In>
__global__ void map_kernel(std::int64_t n, std::int64_t vectors, Fn fn, Out* y,
                           const In*... x) {
  for (std::int64_t i = first_index(); i < vectors; i += index_step()) {
    store_vector(y + i * N,
                 map_vectors<Out, N>(fn, load_vector<N>(x + i * N)...));
  }
  for (std::int64_t i = vectors * N + first_index(); i < n; i += index_step()) {
    y[i] = fn(x[i]...);
  }
}

template <typename Fn, typename Out, typename... In>
void map_arrays(KernelContext& context, const char* name, std::int64_t n, Fn fn,
                Out* y, const In*... x) {
  // The largest type decides how many elements a vector holds.
  constexpr int N = std::min({kLanes<Out>, kLanes<In>...});
  const bool aligned =
      (is_aligned(N * sizeof(In), x) && ...) && is_aligned(N * sizeof(Out), y);
  const std::int64_t vectors = aligned ? n / N : 0;
  launch(context, name, blocks_for(std::max(vectors, n - vectors * N)), kBlock,
         map_kernel<N, Fn, Out, In...>, n, vectors, fn, y, x...);
}

/// y[i] = fn(x[i]...) for i < n, with one input or several; y may be an input.
template <typename In, typename Out = In, typename Fn, typename... Inputs>
void map(KernelContext& context, const char* name, std::int64_t n, Fn fn,
         void* y, const Inputs*... x) {
  map_arrays(context, name, n, fn, static_cast<Out*>(y),
             static_cast<const In*>(x)...);
}

}  // namespace shardbook::kernels::cuda
