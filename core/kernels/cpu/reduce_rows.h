#pragma once

// Sums, maxima and products over one row. Read by core/kernels/*.cpp only.
//
// Four vectors of partial sums hide the latency of addition; element i always
// joins the same partial sum, so the result depends on the row only.

#include <algorithm>
#include <cstdint>
#include <limits>

#include "core/kernels/cpu/simd.h"
#include "core/kernels/cpu/vector_math.h"

namespace shardbook::kernels::cpu {

/// Rows that sums over rows (sum_rows, gradients of gamma and beta) add into
/// one partial sum.
inline constexpr std::int64_t kRowBlock = 128;

/// Sum of all elements, added in f64. All dtypes.
double sum_all(KernelContext& context, DType dtype, std::int64_t n,
               const void* x);

/// Sum over the vectors fn(i, count) of n elements. fn loads the `count`
/// elements from i on, a whole vector unless it is the last, whose rest is
/// neutral.
template <typename T, typename Fn>
inline Compute<T> sum_vectors(std::int64_t n, const Fn& fn) {
  using V = VecOf<T>;
  constexpr std::int64_t kWidth = kLanes<T>;
  V s0(Compute<T>(0)), s1 = s0, s2 = s0, s3 = s0;
  std::int64_t i = 0;
  for (; i + 4 * kWidth <= n; i += 4 * kWidth) {
    s0 = s0 + fn(i, kWidth);
    s1 = s1 + fn(i + kWidth, kWidth);
    s2 = s2 + fn(i + 2 * kWidth, kWidth);
    s3 = s3 + fn(i + 3 * kWidth, kWidth);
  }
  for (; i + kWidth <= n; i += kWidth) s0 = s0 + fn(i, kWidth);
  if (i < n) s1 = s1 + fn(i, n - i);
  return sum_lanes((s0 + s1) + (s2 + s3));
}

/// Loads a vector, or the last part of one.
template <typename T>
inline VecOf<T> load_up_to(const T* x, std::int64_t count,
                           Compute<T> rest = Compute<T>(0)) {
  return count == kLanes<T> ? load(x) : load_part(x, count, rest);
}
template <typename T>
inline void store_up_to(T* x, const VecOf<T>& v, std::int64_t count) {
  if (count == kLanes<T>) {
    store(x, v);
  } else {
    store_part(x, v, count);
  }
}

template <typename T>
inline Compute<T> sum_row(const T* x, std::int64_t n) {
  return sum_vectors<T>(n, [x](std::int64_t i, std::int64_t count) {
    return load_up_to(x + i, count);
  });
}

/// Sum of a[i] * b[i].
template <typename T, typename U>
inline Compute<T> dot_row(const T* a, const U* b, std::int64_t n) {
  return sum_vectors<T>(n, [a, b](std::int64_t i, std::int64_t count) {
    return load_up_to(a + i, count) * load_up_to(b + i, count);
  });
}

/// The sum of exp(x - max), with exp(x - max) kept in y unless it is null.
template <typename T>
inline Compute<T> sum_exp_row(const T* x, std::int64_t n, Compute<T> max,
                              T* y = nullptr) {
  using V = VecOf<T>;
  constexpr auto kNothing = -std::numeric_limits<Compute<T>>::infinity();
  const V shift(max);
  return sum_vectors<T>(n, [&](std::int64_t i, std::int64_t count) {
    const V e = exp_vec(load_up_to(x + i, count, kNothing) - shift);
    if (y != nullptr) store_up_to(y + i, e, count);
    return e;
  });
}

/// The largest element; -infinity for n = 0. NaN may win or lose.
template <typename T>
inline Compute<T> max_row(const T* x, std::int64_t n) {
  using V = VecOf<T>;
  constexpr std::int64_t kWidth = kLanes<T>;
  constexpr auto kLowest = -std::numeric_limits<Compute<T>>::infinity();
  V m0(kLowest), m1 = m0, m2 = m0, m3 = m0;
  std::int64_t i = 0;
  for (; i + 4 * kWidth <= n; i += 4 * kWidth) {
    m0 = xsimd::max(m0, load(x + i));
    m1 = xsimd::max(m1, load(x + i + kWidth));
    m2 = xsimd::max(m2, load(x + i + 2 * kWidth));
    m3 = xsimd::max(m3, load(x + i + 3 * kWidth));
  }
  for (; i + kWidth <= n; i += kWidth) m0 = xsimd::max(m0, load(x + i));
  if (i < n) m1 = xsimd::max(m1, load_part(x + i, n - i, kLowest));
  return max_lanes(xsimd::max(xsimd::max(m0, m1), xsimd::max(m2, m3)));
}

}  // namespace shardbook::kernels::cpu
