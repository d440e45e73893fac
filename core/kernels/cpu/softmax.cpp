#include "core/kernels/softmax.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "core/kernels/cpu/reduce_rows.h"
#include "core/kernels/cpu/simd.h"
#include "core/kernels/cpu/vector_math.h"
#include "core/kernels/elementwise.h"

namespace shardbook::kernels::cpu {

namespace {

// The sum of exp(x - max), with exp(x - max) kept in y unless it is null.
template <typename T>
Compute<T> exp_row(const T* x, std::int64_t n, Compute<T> max, T* y) {
  using V = VecOf<T>;
  constexpr auto kNothing = -std::numeric_limits<Compute<T>>::infinity();
  const V shift(max);
  return sum_vectors<T>(n, [&](std::int64_t i, std::int64_t count) {
    const V e = exp_vec(load_up_to(x + i, count, kNothing) - shift);
    if (y != nullptr) store_up_to(y + i, e, count);
    return e;
  });
}

template <typename T>
Compute<T> log_sum_exp(const T* x, std::int64_t n) {
  const Compute<T> max = max_row(x, n);
  return max + std::log(exp_row(x, n, max, static_cast<T*>(nullptr)));
}

template <typename T>
std::int64_t checked_target(std::int64_t target, std::int64_t row,
                            std::int64_t cols) {
  SB_CHECK(target >= 0 && target < cols, "cross_entropy: target ", target,
           " in row ", row, "; classes are 0 to ", cols - 1);
  return target;
}

double num_counted(std::int64_t rows, const std::int64_t* targets) {
  return static_cast<double>(rows -
                             std::count(targets, targets + rows, kIgnoreIndex));
}

}  // namespace

void softmax(KernelContext&, DType dtype, std::int64_t rows, std::int64_t cols,
             const void* x, void* y) {
  dispatch_floating("softmax", dtype, [&](auto zero) {
    using T = decltype(zero);
    using S = Compute<T>;
    using V = VecOf<T>;
    for_rows(rows, cols, [&](std::int64_t r) {
      const T* in = static_cast<const T*>(x) + r * cols;
      T* out = static_cast<T*>(y) + r * cols;
      const S max = max_row(in, cols);
      if constexpr (std::is_same_v<T, S>) {
        const V inverse(S(1) / exp_row(in, cols, max, out));
        map_range(cols, out, out, [&](const V& e) { return e * inverse; });
      } else {
        // 16 bits: computing exp again avoids rounding twice.
        const V inverse(S(1) / exp_row(in, cols, max, (T*)nullptr));
        const V shift(max);
        map_range(cols, in, out,
                  [&](const V& v) { return exp_vec(v - shift) * inverse; });
      }
    });
  });
}

void softmax_backward(KernelContext&, DType dtype, std::int64_t rows,
                      std::int64_t cols, const void* y, const void* dy,
                      void* dx) {
  dispatch_floating("softmax_backward", dtype, [&](auto zero) {
    using T = decltype(zero);
    using V = VecOf<T>;
    for_rows(rows, cols, [&](std::int64_t r) {
      const T* out = static_cast<const T*>(y) + r * cols;
      const T* grad = static_cast<const T*>(dy) + r * cols;
      const V sum(dot_row(out, grad, cols));
      map_range(cols, out, grad, static_cast<T*>(dx) + r * cols,
                [&](const V& p, const V& g) { return p * (g - sum); });
    });
  });
}

void log_softmax(KernelContext&, DType dtype, std::int64_t rows,
                 std::int64_t cols, const void* x, void* y) {
  dispatch_floating("log_softmax", dtype, [&](auto zero) {
    using T = decltype(zero);
    using V = VecOf<T>;
    for_rows(rows, cols, [&](std::int64_t r) {
      const T* in = static_cast<const T*>(x) + r * cols;
      // Subtract the maximum first: the sum's logarithm is small beside it.
      const Compute<T> max = max_row(in, cols);
      const V shift(max);
      const V log_sum(std::log(exp_row(in, cols, max, (T*)nullptr)));
      map_range(cols, in, static_cast<T*>(y) + r * cols,
                [&](const V& v) { return (v - shift) - log_sum; });
    });
  });
}

void log_softmax_backward(KernelContext&, DType dtype, std::int64_t rows,
                          std::int64_t cols, const void* y, const void* dy,
                          void* dx) {
  dispatch_floating("log_softmax_backward", dtype, [&](auto zero) {
    using T = decltype(zero);
    using V = VecOf<T>;
    for_rows(rows, cols, [&](std::int64_t r) {
      const T* grad = static_cast<const T*>(dy) + r * cols;
      const V sum(sum_row(grad, cols));
      map_range(cols, static_cast<const T*>(y) + r * cols, grad,
                static_cast<T*>(dx) + r * cols,
                [&](const V& v, const V& g) { return g - exp_vec(v) * sum; });
    });
  });
}

void cross_entropy(KernelContext&, DType dtype, std::int64_t rows,
                   std::int64_t cols, const void* logits,
                   const std::int64_t* targets, void* loss, void* logsumexp) {
  dispatch_floating("cross_entropy", dtype, [&](auto zero) {
    using T = decltype(zero);
    using S = Compute<T>;
    for_rows(rows, cols, [&](std::int64_t r) {
      const T* in = static_cast<const T*>(logits) + r * cols;
      const bool ignored = targets[r] == kIgnoreIndex;
      const std::int64_t target =
          ignored ? 0 : checked_target<T>(targets[r], r, cols);
      const S total = log_sum_exp(in, cols);
      if (logsumexp != nullptr) static_cast<S*>(logsumexp)[r] = total;
      static_cast<S*>(loss)[r] = ignored ? S(0) : total - widen(in[target]);
    });
  });
}

void reduce_losses(KernelContext& context, DType stat, std::int64_t rows,
                   const void* losses, const std::int64_t* targets, bool mean,
                   void* loss) {
  const double total = sum_all(context, stat, rows, losses);
  fill(context, stat, 1, loss,
       mean ? total / num_counted(rows, targets) : total);
}

void cross_entropy_backward(KernelContext&, DType dtype, std::int64_t rows,
                            std::int64_t cols, const void* logits,
                            const std::int64_t* targets, const void* logsumexp,
                            const void* dloss, bool mean, void* dlogits) {
  dispatch_floating("cross_entropy_backward", dtype, [&](auto zero) {
    using T = decltype(zero);
    using S = Compute<T>;
    using V = VecOf<T>;
    const double total_factor = *static_cast<const S*>(dloss);
    const S factor = static_cast<S>(
        mean ? total_factor / num_counted(rows, targets) : total_factor);
    for_rows(rows, cols, [&](std::int64_t r) {
      const T* in = static_cast<const T*>(logits) + r * cols;
      T* out = static_cast<T*>(dlogits) + r * cols;
      if (targets[r] == kIgnoreIndex) {
        std::fill(out, out + cols, narrow<T>(S(0)));
        return;
      }
      const std::int64_t target = checked_target<T>(targets[r], r, cols);
      const S total = static_cast<const S*>(logsumexp)[r];
      const S at_target = exp_vec(V(widen(in[target]) - total)).get(0) - S(1);
      const V shift(total), by(factor);
      map_range(cols, in, out,
                [&](const V& v) { return exp_vec(v - shift) * by; });
      out[target] = narrow<T>(at_target * factor);
    });
  });
}

}  // namespace shardbook::kernels::cpu
