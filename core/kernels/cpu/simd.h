#pragma once

// Inside the kernels: vectors of the widest kind this build allows (xsimd), and
// loops over them. Read by core/kernels/*.cpp only.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <xsimd/xsimd.hpp>

// GCC 12 mistakes the undefined operands inside its own intrinsics for ours.
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 14
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include "core/kernels/cpu/elements.h"
#include "core/kernels/cpu/parallel.h"
#include "core/kernels/loops.h"

namespace shardbook::kernels::cpu {

/// Smallest number of items per thread; reductions add in chunks of this size.
constexpr std::int64_t kGrain = 16384;

template <typename T>
using Vec = xsimd::batch<T>;
template <typename T>
using VecOf = xsimd::batch<Compute<T>>;
template <typename T>
constexpr std::int64_t kLanes = static_cast<std::int64_t>(VecOf<T>::size);

/// Loads kLanes<T> elements, widened.
inline Vec<float> load(const float* x) { return Vec<float>::load_unaligned(x); }
inline Vec<double> load(const double* x) {
  return Vec<double>::load_unaligned(x);
}
inline void store(float* x, const Vec<float>& v) { v.store_unaligned(x); }
inline void store(double* x, const Vec<double>& v) { v.store_unaligned(x); }

#ifdef __AVX512BW__
inline Vec<float> load(const BF16* x) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline Vec<float> load(const F16* x) {
  return _mm512_cvtph_ps(
      _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
}
inline void store(BF16* x, const Vec<float>& v) {
  const __m512 value = v;
  const __m512i bits = _mm512_castps_si512(value);
  const __m512i odd =
      _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded =
      _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
  const __m512i result = _mm512_mask_or_epi32(rounded, is_nan, bits,
                                              _mm512_set1_epi32(0x00400000));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(x),
                      _mm512_cvtepi32_epi16(_mm512_srli_epi32(result, 16)));
}
inline void store(F16* x, const Vec<float>& v) {
  _mm256_storeu_si256(
      reinterpret_cast<__m256i*>(x),
      _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#else
template <typename T>
inline Vec<float> load_16bit(const T* x) {
  alignas(64) float wide[Vec<float>::size];
  for (std::size_t i = 0; i < Vec<float>::size; ++i) wide[i] = widen(x[i]);
  return Vec<float>::load_aligned(wide);
}
template <typename T>
inline void store_16bit(T* x, const Vec<float>& v) {
  alignas(64) float wide[Vec<float>::size];
  v.store_aligned(wide);
  for (std::size_t i = 0; i < Vec<float>::size; ++i) x[i] = narrow<T>(wide[i]);
}
// Compilers vectorize bf16's shifts, but not f16's instructions.
inline Vec<float> load(const BF16* x) { return load_16bit(x); }
inline void store(BF16* x, const Vec<float>& v) { store_16bit(x, v); }
#if defined(__AVX2__) && defined(__F16C__)
inline Vec<float> load(const F16* x) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
}
inline void store(F16* x, const Vec<float>& v) {
  _mm_storeu_si128(
      reinterpret_cast<__m128i*>(x),
      _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#else
inline Vec<float> load(const F16* x) { return load_16bit(x); }
inline void store(F16* x, const Vec<float>& v) { store_16bit(x, v); }
#endif
#endif

/// The values as an array of T would hold them.
template <typename T>
inline VecOf<T> rounded(const VecOf<T>& v) {
  if constexpr (std::is_same_v<T, Compute<T>>) {
    return v;
  } else {
    alignas(64) T held[kLanes<T>];
    store(held, v);
    return load(held);
  }
}

// The ends of ranges are functions of their own: inlined into every loop, they
// are most of what the compiler has to do.

/// Loads the first `count` < kLanes<T> elements; the other lanes hold `rest`.
template <typename T>
[[gnu::noinline]] VecOf<T> load_part(const T* x, std::int64_t count,
                                     Compute<T> rest = Compute<T>(0)) {
  alignas(64) Compute<T> lanes[kLanes<T>];
  for (std::int64_t i = 0; i < kLanes<T>; ++i) lanes[i] = rest;
  for (std::int64_t i = 0; i < count; ++i) lanes[i] = widen(x[i]);
  return VecOf<T>::load_aligned(lanes);
}
template <typename T>
[[gnu::noinline]] void store_part(T* x, const VecOf<T>& v, std::int64_t count) {
  alignas(64) Compute<T> lanes[kLanes<T>];
  v.store_aligned(lanes);
  for (std::int64_t i = 0; i < count; ++i) x[i] = narrow<T>(lanes[i]);
}

/// Sums and maxima of the lanes, in a fixed order.
template <typename V>
inline typename V::value_type sum_lanes(const V& v) {
  alignas(64) typename V::value_type lanes[V::size];
  v.store_aligned(lanes);
  for (std::size_t width = V::size / 2; width > 0; width /= 2) {
    for (std::size_t i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}
template <typename V>
inline typename V::value_type max_lanes(const V& v) {
  alignas(64) typename V::value_type lanes[V::size];
  v.store_aligned(lanes);
  for (std::size_t width = V::size / 2; width > 0; width /= 2) {
    for (std::size_t i = 0; i < width; ++i) {
      const auto other = lanes[i + width];
      // NaN in either stays
      lanes[i] = lanes[i] > other || lanes[i] != lanes[i] ? lanes[i] : other;
    }
  }
  return lanes[0];
}
#ifdef __AVX512F__
inline float sum_lanes(const Vec<float>& v) { return _mm512_reduce_add_ps(v); }
inline float max_lanes(const Vec<float>& v) {
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  if (nan != 0) return std::numeric_limits<float>::quiet_NaN();
  return _mm512_reduce_max_ps(v);
}
#elif defined(__AVX2__)
// The same order without a detour through memory: halves first.
inline float sum_lanes(const Vec<float>& v) {
  const __m256 x = v;
  const __m128 four =
      _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float max_lanes(const Vec<float>& v) {
  const __m256 x = v;
  if (_mm256_movemask_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)) != 0) {
    return std::numeric_limits<float>::quiet_NaN();
  }
  const __m128 four =
      _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
#endif

/// y[i] = fn(x[i]) vector by vector, in the calling thread. fn takes and
/// returns vectors.
template <typename T, typename Fn>
inline void map_range(std::int64_t n, const T* x, T* y, const Fn& fn) {
  std::int64_t i = 0;
  for (; i + kLanes<T> <= n; i += kLanes<T>) store(y + i, fn(load(x + i)));
  if (i < n) store_part(y + i, fn(load_part(x + i, n - i)), n - i);
}
template <typename T, typename Fn>
inline void map_range(std::int64_t n, const T* a, const T* b, T* y,
                      const Fn& fn) {
  std::int64_t i = 0;
  for (; i + kLanes<T> <= n; i += kLanes<T>) {
    store(y + i, fn(load(a + i), load(b + i)));
  }
  if (i < n) {
    store_part(y + i, fn(load_part(a + i, n - i), load_part(b + i, n - i)),
               n - i);
  }
}

/// The same over the cores of this rank.
template <typename T, typename Fn>
inline void map(std::int64_t n, const T* x, T* y, const Fn& fn) {
  parallel_for(0, n, kGrain, [&](std::int64_t from, std::int64_t to) {
    map_range(to - from, x + from, y + from, fn);
  });
}
template <typename T, typename Fn>
inline void map(std::int64_t n, const T* a, const T* b, T* y, const Fn& fn) {
  parallel_for(0, n, kGrain, [&](std::int64_t from, std::int64_t to) {
    map_range(to - from, a + from, b + from, y + from, fn);
  });
}

/// Smallest number of rows per thread, given their length.
inline std::int64_t row_grain(std::int64_t cols) {
  return std::max<std::int64_t>(1, kGrain / std::max<std::int64_t>(1, cols));
}

/// Calls fn(row) for all rows, over the cores of this rank.
template <typename Fn>
inline void for_rows(std::int64_t rows, std::int64_t cols, const Fn& fn) {
  parallel_for(0, rows, row_grain(cols),
               [&](std::int64_t from, std::int64_t to) {
                 for (std::int64_t r = from; r < to; ++r) fn(r);
               });
}

/// Calls fn(row, a, b) for all loops but the last, over the cores of this rank:
/// `row` counts the calls, and the last loop begins at elements a and b of the
/// two arrays.
template <typename Fn>
inline void for_outer(const Loops& loops, const Fn& fn) {
  const std::size_t outer = loops.sizes.size() - 1;
  std::int64_t count = 1;
  for (std::size_t d = 0; d < outer; ++d) count *= loops.sizes[d];
  parallel_for(0, count, row_grain(loops.sizes[outer]),
               [&](std::int64_t from, std::int64_t to) {
                 // Count like an odometer: no division in the loop.
                 std::int64_t index[kMaxDims] = {};
                 std::int64_t rest = from, a = 0, b = 0;
                 for (std::size_t d = outer; d-- > 0;) {
                   index[d] = rest % loops.sizes[d];
                   rest /= loops.sizes[d];
                   a += index[d] * loops.a[d];
                   b += index[d] * loops.b[d];
                 }
                 for (std::int64_t i = from; i < to; ++i) {
                   fn(i, a, b);
                   for (std::size_t d = outer; d-- > 0;) {
                     a += loops.a[d];
                     b += loops.b[d];
                     if (++index[d] < loops.sizes[d]) break;
                     a -= loops.a[d] * loops.sizes[d];
                     b -= loops.b[d] * loops.sizes[d];
                     index[d] = 0;
                   }
                 }
               });
}

/// Calls fn(i, count) for vectors that cover n elements: the `count` elements
/// from i on, a whole vector unless it is the last.
template <typename T, typename Fn>
inline void for_vectors(std::int64_t n, const Fn& fn) {
  std::int64_t i = 0;
  for (; i + kLanes<T> <= n; i += kLanes<T>) fn(i, kLanes<T>);
  if (i < n) fn(i, n - i);
}

}  // namespace shardbook::kernels::cpu
