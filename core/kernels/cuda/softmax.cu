// Softmax. A warp works on a row of up to 1024 elements, a block on a longer one
// (warp_rows.h).

#include "core/kernels/softmax.h"

#include <cmath>
#include <limits>

#include "core/kernels/cuda/warp_rows.h"

namespace shardbook::kernels::cuda {

namespace {

/// Softmax, or with kLog its logarithm.
template <typename T, typename Shape, bool kLog>
__global__ void softmax_rows(std::int64_t rows, std::int64_t cols, const T* x,
                             T* y) {
  using S = Compute<T>;
  constexpr int kWidth = Shape::kWidth;
  const std::int64_t row = Shape::first_row();
  if (row >= rows) return;  // Never a part of a warp
  const RowPart<T, Shape> part(x + row * cols, cols);

  S max = -std::numeric_limits<S>::infinity();
  Shape::for_vectors(cols, [&](int i, std::int64_t column) {
    const auto v = part.at(i, column);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) max = Max()(max, widen(v[j]));
  });
  max = Shape::largest(max);

  S sum = 0;
  Shape::for_vectors(cols, [&](int i, std::int64_t column) {
    const auto v = part.at(i, column);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sum += std::exp(widen(v[j]) - max);
  });
  sum = Shape::sum(sum);

  // The maximum is subtracted first: the sum's logarithm is small beside it.
  const S last = kLog ? std::log(sum) : S(1) / sum;
  Shape::for_vectors(cols, [&](int i, std::int64_t column) {
    const auto v = part.at(i, column);
    AlignedVector<T, kWidth> out;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const S d = widen(v[j]) - max;
      out[j] = narrow<T>(kLog ? d - last : std::exp(d) * last);
    }
    store_vector(y + row * cols + column, out);
  });
}

template <typename T, typename Shape, bool kLog>
__global__ void softmax_gradients(std::int64_t rows, std::int64_t cols,
                                  const T* y, const T* dy, T* dx) {
  using S = Compute<T>;
  constexpr int kWidth = Shape::kWidth;
  const std::int64_t row = Shape::first_row();
  if (row >= rows) return;
  const RowPart<T, Shape> part(y + row * cols, cols);
  const RowPart<T, Shape> grad(dy + row * cols, cols);

  S sum = 0;
  Shape::for_vectors(cols, [&](int i, std::int64_t column) {
    const auto v = part.at(i, column), g = grad.at(i, column);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      sum += kLog ? widen(g[j]) : widen(v[j]) * widen(g[j]);
    }
  });
  sum = Shape::sum(sum);

  Shape::for_vectors(cols, [&](int i, std::int64_t column) {
    const auto v = part.at(i, column), g = grad.at(i, column);
    AlignedVector<T, kWidth> out;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const S p = widen(v[j]), up = widen(g[j]);
      out[j] = narrow<T>(kLog ? up - std::exp(p) * sum : p * (up - sum));
    }
    store_vector(dx + row * cols + column, out);
  });
}

}  // namespace

void softmax(KernelContext& context, DType dtype, std::int64_t rows,
             std::int64_t cols, const void* x, void* y, bool log) {
  const char* const name = log ? "log_softmax" : "softmax";
  with_floating(name, dtype, [&](auto zero) {
    using T = decltype(zero);
    with_row_shape<T>(cols, is_aligned(kVectorBytes, x, y), [&](auto shape) {
      using Shape = decltype(shape);
      launch(context, name, Shape::grid(rows), Shape::kBlockThreads,
             log ? softmax_rows<T, Shape, true> : softmax_rows<T, Shape, false>,
             rows, cols, x, y);
    });
  });
}

void softmax_backward(KernelContext& context, DType dtype, std::int64_t rows,
                      std::int64_t cols, const void* y, const void* dy,
                      void* dx, bool log) {
  const char* const name = log ? "log_softmax_backward" : "softmax_backward";
  with_floating(name, dtype, [&](auto zero) {
    using T = decltype(zero);
    const bool aligned = is_aligned(kVectorBytes, y, dy, dx);
    with_row_shape<T>(cols, aligned, [&](auto shape) {
      using Shape = decltype(shape);
      launch(context, name, Shape::grid(rows), Shape::kBlockThreads,
             log ? softmax_gradients<T, Shape, true>
                 : softmax_gradients<T, Shape, false>,
             rows, cols, y, dy, dx);
    });
  });
}

SHARDBOOK_CUDA_KERNEL(softmax);
SHARDBOOK_CUDA_KERNEL(softmax_backward);

}  // namespace shardbook::kernels::cuda
