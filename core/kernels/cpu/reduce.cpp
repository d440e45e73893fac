#include "core/kernels/reduce.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "core/check.h"
#include "core/kernels/cpu/reduce_rows.h"
#include "core/kernels/cpu/simd.h"
#include "core/kernels/elementwise.h"
#include "core/kernels/sum_passes.h"

namespace shardbook::kernels::cpu {

namespace {

// out[c] (+)= sum over r of x[r, c] for columns [from, to): blocks of rows in
// order, a few vectors of columns at a time so that the sums stay in registers.
template <typename T>
void sum_columns(std::int64_t rows, std::int64_t cols, std::int64_t from,
                 std::int64_t to, const T* x, Compute<T>* out) {
  using V = VecOf<T>;
  constexpr std::int64_t kWidth = kLanes<T>;
  constexpr std::int64_t kVecs = 8;
  std::int64_t c = from;
  for (; c + kVecs * kWidth <= to; c += kVecs * kWidth) {
    V sums[kVecs];
    for (V& sum : sums) sum = V(Compute<T>(0));
    for (std::int64_t r = 0; r < rows; ++r) {
      const T* row = x + r * cols + c;
#pragma GCC unroll 8
      for (std::int64_t v = 0; v < kVecs; ++v) {
        sums[v] = sums[v] + load(row + v * kWidth);
      }
    }
    for (std::int64_t v = 0; v < kVecs; ++v) {
      Compute<T>* to_out = out + c + v * kWidth;
      store(to_out, load(to_out) + sums[v]);
    }
  }
  for (; c + kWidth <= to; c += kWidth) {
    V sum(Compute<T>(0));
    for (std::int64_t r = 0; r < rows; ++r) sum = sum + load(x + r * cols + c);
    store(out + c, load(out + c) + sum);
  }
  for (; c < to; ++c) {
    Compute<T> sum(0);
    for (std::int64_t r = 0; r < rows; ++r) sum += widen(x[r * cols + c]);
    out[c] += sum;
  }
}

template <typename T, typename Out>
void sum_rows_typed(KernelContext& context, std::int64_t rows,
                    std::int64_t cols, const T* x, Out* out) {
  using S = Compute<T>;
  Scratch scratch(context, cols * sizeof(S));
  S* const sums = scratch.as<S>();
  // Threads share the columns: the order of rows is the same for any number.
  const std::int64_t grain =
      std::max<std::int64_t>(128, kGrain / std::max<std::int64_t>(1, rows));
  parallel_for(0, cols, grain, [&](std::int64_t from, std::int64_t to) {
    std::fill(sums + from, sums + to, S(0));
    for (std::int64_t r = 0; r < rows; r += kRowBlock) {
      sum_columns(std::min(kRowBlock, rows - r), cols, from, to, x + r * cols,
                  sums);
    }
    for (std::int64_t c = from; c < to; ++c) out[c] = narrow<Out>(sums[c]);
  });
}

// Joins, in order, of_chunk(begin, end) of each kGrain of n elements; threads
// share the chunks.
template <typename Fn, typename Join>
double join_chunks(KernelContext& context, std::int64_t n, const Fn& of_chunk,
                   const Join& join) {
  const std::int64_t chunks = (n + kGrain - 1) / kGrain;
  Scratch scratch(context, chunks * sizeof(double));
  double* const partial = scratch.as<double>();
  parallel_for(0, chunks, 1, [&](std::int64_t from, std::int64_t to) {
    for (std::int64_t chunk = from; chunk < to; ++chunk) {
      partial[chunk] =
          of_chunk(chunk * kGrain, std::min(n, (chunk + 1) * kGrain));
    }
  });
  return std::accumulate(partial, partial + chunks, 0.0, join);
}

// Sum of fn(part of x, its size) over parts of 1024.
template <typename T, typename Fn>
double sum_f64(KernelContext& context, std::int64_t n, const T* x,
               const Fn& fn) {
  const auto of_chunk = [&](std::int64_t begin, std::int64_t end) {
    double sum = 0.0;
    for (std::int64_t i = begin; i < end; i += 1024) {
      sum += fn(x + i, std::min<std::int64_t>(1024, end - i));
    }
    return sum;
  };
  return join_chunks(context, n, of_chunk, std::plus<>());
}

// The sum of the elements, or of their squares, in f64.
template <bool kSquare, typename T>
double sum_chunk(const T* x, std::int64_t n) {
  if constexpr (std::is_integral_v<T>) {
    double sum = 0.0;
    for (std::int64_t i = 0; i < n; ++i) sum += static_cast<double>(x[i]);
    return sum;
  } else {
    // Plain loops over a fixed number of sums: the compiler vectorizes them.
    constexpr std::int64_t kSums = 32;
    double sums[kSums] = {};
    std::int64_t i = 0;
    for (; i + kSums <= n; i += kSums) {
      for (std::int64_t j = 0; j < kSums; ++j) {
        const double v = widen(x[i + j]);
        sums[j] += kSquare ? v * v : v;
      }
    }
    for (; i < n; ++i) {
      const double v = widen(x[i]);
      sums[i % kSums] += kSquare ? v * v : v;
    }
    for (std::int64_t width = kSums / 2; width > 0; width /= 2) {
      for (std::int64_t j = 0; j < width; ++j) sums[j] += sums[j + width];
    }
    return sums[0];
  }
}

// The largest fn(i) over [0, n), where NaN is larger than anything.
template <typename Fn>
double max_over(KernelContext& context, std::int64_t n, const Fn& fn) {
  const auto larger = [](double a, double b) {
    return a > b || a != a ? a : b;
  };
  const auto of_chunk = [&](std::int64_t begin, std::int64_t end) {
    double best = 0.0;
    for (std::int64_t i = begin; i < end; ++i) best = larger(best, fn(i));
    return best;
  };
  return join_chunks(context, n, of_chunk, larger);
}

}  // namespace

void sum_rows(KernelContext& context, DType dtype, std::int64_t rows,
              std::int64_t cols, const void* x, void* out) {
  dispatch_floating("sum_rows", dtype, [&](auto zero) {
    using T = decltype(zero);
    sum_rows_typed(context, rows, cols, static_cast<const T*>(x),
                   static_cast<T*>(out));
  });
}

void sum_to_shape(KernelContext& context, DType dtype, const Dims& x_shape,
                  const void* x, const Dims& out_shape, void* out) {
  dispatch_floating("sum_to_shape", dtype, [&](auto zero) {
    using T = decltype(zero);
    sum_in_passes<Compute<T>>(
        context, dtype, x_shape, static_cast<const T*>(x), out_shape,
        static_cast<T*>(out),
        [&](std::int64_t outer, std::int64_t n, std::int64_t inner,
            const auto* from, auto* to) {
          if (inner == 1) {
            using Out = std::remove_pointer_t<decltype(to)>;
            return for_rows(outer, n, [&](std::int64_t r) {
              to[r] = narrow<Out>(sum_row(from + r * n, n));
            });
          }
          for (std::int64_t o = 0; o < outer; ++o) {
            sum_rows_typed(context, n, inner, from + o * n * inner,
                           to + o * inner);
          }
        });
  });
}

double sum_all(KernelContext& context, DType dtype, std::int64_t n,
               const void* x) {
  return dispatch_any("sum_all", dtype, [&](auto zero) {
    using T = decltype(zero);
    return sum_f64(context, n, static_cast<const T*>(x), sum_chunk<false, T>);
  });
}

void sum_all_into(KernelContext& context, DType dtype, std::int64_t n,
                  double factor, const void* x, void* y) {
  fill(context, dtype, 1, y, factor * sum_all(context, dtype, n, x));
}

double sum_squares(KernelContext& context, DType dtype, std::int64_t n,
                   const void* x) {
  return dispatch_floating("sum_squares", dtype, [&](auto zero) {
    using T = decltype(zero);
    return sum_f64(context, n, static_cast<const T*>(x), sum_chunk<true, T>);
  });
}

double max_abs_difference(KernelContext& context, DType dtype, std::int64_t n,
                          const void* a, const void* b) {
  return dispatch_any("max_abs_difference", dtype, [&](auto zero) {
    using T = decltype(zero);
    const T* x = static_cast<const T*>(a);
    const T* y = static_cast<const T*>(b);
    return max_over(context, n, [&](std::int64_t i) {
      const auto u = static_cast<double>(widen(x[i]));
      const auto v = static_cast<double>(widen(y[i]));
      return u == v ? 0.0 : std::fabs(u - v);
    });
  });
}

}  // namespace shardbook::kernels::cpu
