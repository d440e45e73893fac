// SwiGLU: a thread owns vectors of the result, a grid apart.

#include "core/kernels/swiglu.h"

#include <cmath>
#include <cstdint>

#include "core/kernels/cuda/vector.h"

namespace shardbook::kernels::cuda {

namespace {

/// silu(gate) as `up` multiplies it, and the slope of silu.
template <typename T>
struct Silu {
  using S = Compute<T>;
  S value, slope;

  __device__ explicit Silu(T gate) {
    const S g = widen(gate), s = S(1) / (S(1) + std::exp(-g));
    value = widen(narrow<T>(g * s));
    slope = s * std::fma(g, S(1) - s, S(1));
  }
};

/// Calls body(result, gate) for all vectors of this thread: where they begin in
/// [rows, cols], and in [rows, 2 cols].
template <int N, typename Index, typename Body>
__device__ void for_gates(Index rows, Index cols, Body body) {
  const Index pieces = cols / N;
  for (Index i = static_cast<Index>(first_index()); i < rows * pieces;
       i += static_cast<Index>(index_step())) {
    const std::int64_t row = i / pieces, column = i % pieces * N;
    body(row * cols + column, row * 2 * cols + column);
  }
}

template <int N, typename Index, typename T>
__global__ void swiglu_kernel(Index rows, Index cols, const T* gate_up, T* y) {
  for_gates<N>(rows, cols, [&](std::int64_t to, std::int64_t at) {
    const auto gate = load_vector<N>(gate_up + at),
               up = load_vector<N>(gate_up + at + cols);
    AlignedVector<T, N> out;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      out[j] = narrow<T>(Silu<T>(gate[j]).value * widen(up[j]));
    }
    store_vector(y + to, out);
  });
}

template <int N, typename Index, typename T>
__global__ void swiglu_backward_kernel(Index rows, Index cols, const T* gate_up,
                                       const T* dy, T* dgate_up) {
  for_gates<N>(rows, cols, [&](std::int64_t from, std::int64_t at) {
    const auto gate = load_vector<N>(gate_up + at),
               up = load_vector<N>(gate_up + at + cols),
               grad = load_vector<N>(dy + from);
    AlignedVector<T, N> dgate, dup;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const Silu<T> silu(gate[j]);
      const T dsilu = narrow<T>(widen(grad[j]) * widen(up[j]));
      dgate[j] = narrow<T>(widen(dsilu) * silu.slope);
      dup[j] = narrow<T>(widen(grad[j]) * silu.value);
    }
    store_vector(dgate_up + at, dgate);
    store_vector(dgate_up + at + cols, dup);
  });
}

/// Calls body(width, index): elements of a vector, and the type of an index.
/// Dividing 32 bits is several times as fast as dividing 64.
template <typename T, typename Body>
void with_vectors(std::int64_t rows, std::int64_t cols, bool aligned,
                  Body body) {
  with_width<T>(cols, aligned, [&](auto width) {
    if (rows * cols < std::int64_t{1} << 31) {
      body(width, std::uint32_t{});
    } else {
      body(width, std::int64_t{});
    }
  });
}

}  // namespace

void swiglu(KernelContext& context, DType dtype, std::int64_t rows,
            std::int64_t cols, const void* gate_up, void* y) {
  with_floating("swiglu", dtype, [&](auto zero) {
    using T = decltype(zero);
    with_vectors<T>(rows, cols, is_aligned(kVectorBytes, gate_up, y),
                    [&](auto width, auto index) {
                      launch(context, "swiglu",
                             blocks_for(rows * cols / width()), kBlock,
                             swiglu_kernel<width(), decltype(index), T>, rows,
                             cols, gate_up, y);
                    });
  });
}

void swiglu_backward(KernelContext& context, DType dtype, std::int64_t rows,
                     std::int64_t cols, const void* gate_up, const void* dy,
                     void* dgate_up) {
  with_floating("swiglu_backward", dtype, [&](auto zero) {
    using T = decltype(zero);
    with_vectors<T>(
        rows, cols, is_aligned(kVectorBytes, gate_up, dy, dgate_up),
        [&](auto width, auto index) {
          launch(context, "swiglu_backward", blocks_for(rows * cols / width()),
                 kBlock, swiglu_backward_kernel<width(), decltype(index), T>,
                 rows, cols, gate_up, dy, dgate_up);
        });
  });
}

SHARDBOOK_CUDA_KERNEL(swiglu);
SHARDBOOK_CUDA_KERNEL(swiglu_backward);

}  // namespace shardbook::kernels::cuda
