#pragma once

// Inside the kernels: vectors of the widest kind this build allows (xsimd),
// 16-bit elements that widen to f32, and the functions that training needs.
// Read by core/kernels/*.cpp only.

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <xsimd/xsimd.hpp>

// GCC 12 mistakes the undefined operands inside its own intrinsics for ours.
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 14
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include "core/check.h"
#include "core/dtype.h"
#include "core/kernels/cpu/parallel.h"

#ifdef __F16C__
#include <immintrin.h>
#endif

namespace shardbook::kernels {

/// Items that one thread takes at least; reductions add in chunks of this size.
constexpr std::int64_t kGrain = 16384;

struct BF16 {
  std::uint16_t bits;
};
struct F16 {
  std::uint16_t bits;
};

inline float widen(BF16 x) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16);
}

inline float widen(F16 x) {
#ifdef __F16C__
  return _cvtsh_ss(x.bits);
#else
  const std::uint32_t sign = (x.bits & 0x8000u) << 16;
  const std::uint32_t magnitude = x.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // Infinity or NaN
    return std::bit_cast<float>(sign | 0x7f800000u |
                                ((magnitude & 0x3ffu) << 13));
  }
  // Shift into place as a tiny float, then scale by 2^112: exact, and right
  // for subnormals too.
  const float scaled = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(scaled) | sign);
#endif
}

inline float widen(float x) { return x; }
inline double widen(double x) { return x; }

template <typename T>
T narrow(float x);
template <typename T>
T narrow(double x);

template <>
inline float narrow<float>(float x) {
  return x;
}
template <>
inline double narrow<double>(double x) {
  return x;
}
template <>
inline float narrow<float>(double x) {
  return static_cast<float>(x);
}
template <>
inline double narrow<double>(float x) {
  return x;
}

template <>
inline BF16 narrow<BF16>(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  if (x != x) return {static_cast<std::uint16_t>((bits >> 16) | 0x40u)};
  return {
      static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

template <>
inline F16 narrow<F16>(float x) {
#ifdef __F16C__
  return {static_cast<std::uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT))};
#else
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return {static_cast<std::uint16_t>(sign | 0x7e00u)};
  }
  if (magnitude >= 0x477ff000u) {  // Rounds to 2^16 or more
    return {static_cast<std::uint16_t>(sign | 0x7c00u)};
  }
  if (magnitude < 0x38800000u) {
    // Subnormal: adding 0.5 lines the bits up, and rounds them.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return {static_cast<std::uint16_t>(
        sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3f000000u))};
  }
  const std::uint32_t rounded =
      magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23);
  return {static_cast<std::uint16_t>(sign | (rounded >> 13))};
#endif
}

/// f64 to 16 bits rounds once: to f32 towards an odd last bit, then to nearest.
inline float round_to_odd(double x) {
  const float nearest = static_cast<float>(x);
  if (static_cast<double>(nearest) == x || !(std::fabs(x) < 1e38)) {
    return nearest;
  }
  auto bits = std::bit_cast<std::uint32_t>(nearest);
  const bool away = std::fabs(static_cast<double>(nearest)) > std::fabs(x);
  if (away) bits -= 1;  // Towards zero
  return std::bit_cast<float>(bits | 1u);
}
template <>
inline BF16 narrow<BF16>(double x) {
  return narrow<BF16>(round_to_odd(x));
}
template <>
inline F16 narrow<F16>(double x) {
  return narrow<F16>(round_to_odd(x));
}

/// What arithmetic on T is done in.
template <typename T>
using Compute =
    std::conditional_t<std::is_same_v<T, BF16> || std::is_same_v<T, F16>, float,
                       T>;

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
inline Vec<float> load(const BF16* x) { return load_16bit(x); }
inline Vec<float> load(const F16* x) { return load_16bit(x); }
inline void store(BF16* x, const Vec<float>& v) { store_16bit(x, v); }
inline void store(F16* x, const Vec<float>& v) { store_16bit(x, v); }
#endif

/// Loads the first `count` < kLanes<T> elements; the other lanes hold `rest`.
template <typename T>
inline VecOf<T> load_part(const T* x, std::int64_t count,
                          Compute<T> rest = Compute<T>(0)) {
  alignas(64) Compute<T> lanes[kLanes<T>];
  for (std::int64_t i = 0; i < kLanes<T>; ++i) lanes[i] = rest;
  for (std::int64_t i = 0; i < count; ++i) lanes[i] = widen(x[i]);
  return VecOf<T>::load_aligned(lanes);
}
template <typename T>
inline void store_part(T* x, const VecOf<T>& v, std::int64_t count) {
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
#endif

/// p * 2^n for an integral n; overflows and underflows as it should.
inline Vec<float> times_power_of_two(const Vec<float>& p, const Vec<float>& n) {
#ifdef __AVX512F__
  return _mm512_scalef_ps(p, n);
#else
  // In two halves, so that neither factor overflows before the result does.
  using Ints = xsimd::batch<std::int32_t>;
  const Ints whole = xsimd::to_int(n);
  const Ints half = whole >> 1;
  const auto power = [](const Ints& e) {
    return xsimd::bitwise_cast<Vec<float>>((e + Ints(127)) << 23);
  };
  return p * power(half) * power(whole - half);
#endif
}

/// e^x within 1 ulp or so; infinity above 88.73, 0 where the result would be
/// subnormal: those cost a hundred times as much, and masked scores are many.
inline Vec<float> exp_vec(const Vec<float>& x) {
  using V = Vec<float>;
  const V lowest(-87.336544f);  // Logarithm of the least normal number
  // NaN survives: min and max return their second operand then.
  const V in = xsimd::max(lowest, xsimd::min(V(89.0f), x));
  const V n = xsimd::nearbyint(in * V(1.44269504088896341f));
  V r = xsimd::fma(n, V(-0.693359375f), in);
  r = xsimd::fma(n, V(2.12194440e-4f), r);
  V p(1.9875691500e-4f);
  p = xsimd::fma(p, r, V(1.3981999507e-3f));
  p = xsimd::fma(p, r, V(8.3334519073e-3f));
  p = xsimd::fma(p, r, V(4.1665795894e-2f));
  p = xsimd::fma(p, r, V(1.6666665459e-1f));
  p = xsimd::fma(p, r, V(5.0000001201e-1f));
  p = xsimd::fma(p, r * r, r + V(1.0f));
  return xsimd::select(x < lowest, V(0.0f), times_power_of_two(p, n));
}

/// Lane by lane through the C library: proofs need the digits, not the speed.
template <typename Fn>
inline Vec<double> each_lane(const Vec<double>& x, Fn fn) {
  alignas(64) double lanes[Vec<double>::size];
  x.store_aligned(lanes);
  for (double& lane : lanes) lane = fn(lane);
  return Vec<double>::load_aligned(lanes);
}
inline Vec<double> exp_vec(const Vec<double>& x) {
  return each_lane(x, [](double v) { return std::exp(v); });
}

inline Vec<float> sigmoid_vec(const Vec<float>& x) {
  return Vec<float>(1.0f) / (Vec<float>(1.0f) + exp_vec(-x));
}
inline Vec<double> sigmoid_vec(const Vec<double>& x) {
  return each_lane(x, [](double v) { return 1.0 / (1.0 + std::exp(-v)); });
}

inline Vec<float> tanh_vec(const Vec<float>& x) {
  using V = Vec<float>;
  const V a = xsimd::abs(x);
  // Near zero a polynomial keeps the relative accuracy.
  const V s = x * x;
  V p(-5.70498872745e-3f);
  p = xsimd::fma(p, s, V(2.06390887954e-2f));
  p = xsimd::fma(p, s, V(-5.37397155531e-2f));
  p = xsimd::fma(p, s, V(1.33314422036e-1f));
  p = xsimd::fma(p, s, V(-3.33332819422e-1f));
  const V small = xsimd::fma(p * s, x, x);
  const V large = V(1.0f) - V(2.0f) / (exp_vec(a + a) + V(1.0f));
  return xsimd::select(a < V(0.625f), small, xsimd::copysign(large, x));
}
inline Vec<double> tanh_vec(const Vec<double>& x) {
  return each_lane(x, [](double v) { return std::tanh(v); });
}

inline Vec<float> log_vec(const Vec<float>& x) { return xsimd::log(x); }
inline Vec<double> log_vec(const Vec<double>& x) {
  return each_lane(x, [](double v) { return std::log(v); });
}

/// Calls fn(T()) for the element type of a floating dtype.
template <typename Fn>
decltype(auto) dispatch_floating(const char* kernel, DType dtype, Fn&& fn) {
  switch (dtype) {
    case DType::kF64:
      return fn(double());
    case DType::kF32:
      return fn(float());
    case DType::kBF16:
      return fn(BF16());
    case DType::kF16:
      return fn(F16());
    default:
      SB_FAIL(kernel, ": dtype ", dtype_name(dtype),
              "; give f64, f32, bf16 or f16");
  }
}

/// Calls fn(T()) for the element type of any dtype.
template <typename Fn>
decltype(auto) dispatch_any(const char* kernel, DType dtype, Fn&& fn) {
  switch (dtype) {
    case DType::kI64:
      return fn(std::int64_t());
    case DType::kI32:
      return fn(std::int32_t());
    default:
      return dispatch_floating(kernel, dtype, fn);
  }
}

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

/// Rows that one thread takes at least, given their length.
inline std::int64_t row_grain(std::int64_t cols) {
  return std::max<std::int64_t>(1, kGrain / std::max<std::int64_t>(1, cols));
}

}  // namespace shardbook::kernels
