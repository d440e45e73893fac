#include "core/kernels/softmax.h"

#include <cmath>

#include "core/kernels/cpu/reduce_rows.h"
#include "core/kernels/cpu/simd.h"
#include "core/kernels/cpu/vector_math.h"

namespace shardbook::kernels::cpu {

void softmax(KernelContext&, DType dtype, std::int64_t rows, std::int64_t cols,
             const void* x, void* y, bool log) {
  dispatch_floating(log ? "log_softmax" : "softmax", dtype, [&](auto zero) {
    using T = decltype(zero);
    using S = Compute<T>;
    using V = VecOf<T>;
    for_rows(rows, cols, [&](std::int64_t r) {
      const T* in = static_cast<const T*>(x) + r * cols;
      T* out = static_cast<T*>(y) + r * cols;
      const S max = max_row(in, cols);
      const V shift(max);
      if (log) {
        // Subtract the maximum first: the sum's logarithm is small beside it.
        const V log_sum(std::log(sum_exp_row(in, cols, max)));
        map_range(cols, in, out,
                  [&](const V& v) { return (v - shift) - log_sum; });
      } else if constexpr (std::is_same_v<T, S>) {
        const V inverse(S(1) / sum_exp_row(in, cols, max, out));
        map_range(cols, out, out, [&](const V& e) { return e * inverse; });
      } else {
        // 16 bits: computing exp again avoids rounding twice.
        const V inverse(S(1) / sum_exp_row(in, cols, max));
        map_range(cols, in, out,
                  [&](const V& v) { return exp_vec(v - shift) * inverse; });
      }
    });
  });
}

void softmax_backward(KernelContext&, DType dtype, std::int64_t rows,
                      std::int64_t cols, const void* y, const void* dy,
                      void* dx, bool log) {
  const char* const name = log ? "log_softmax_backward" : "softmax_backward";
  dispatch_floating(name, dtype, [&](auto zero) {
    using T = decltype(zero);
    using V = VecOf<T>;
    for_rows(rows, cols, [&](std::int64_t r) {
      const T* out = static_cast<const T*>(y) + r * cols;
      const T* grad = static_cast<const T*>(dy) + r * cols;
      T* const to = static_cast<T*>(dx) + r * cols;
      if (log) {
        const V sum(sum_row(grad, cols));
        map_range(cols, out, grad, to,
                  [&](const V& v, const V& g) { return g - exp_vec(v) * sum; });
      } else {
        const V sum(dot_row(out, grad, cols));
        map_range(cols, out, grad, to,
                  [&](const V& p, const V& g) { return p * (g - sum); });
      }
    });
  });
}

}  // namespace shardbook::kernels::cpu
