#pragma once

// Inside the kernels: exponentials and their kin, a vector at a time. Read by
// core/kernels/*.cpp only.

#include <cmath>
#include <cstdint>

#include "core/kernels/cpu/simd.h"

namespace shardbook::kernels::cpu {

#ifndef __AVX512F__
/// The same bits as floats.
inline Vec<float> as_floats(const xsimd::batch<std::int32_t>& bits) {
#if XSIMD_VERSION_MAJOR < 11
  return xsimd::bitwise_cast<Vec<float> >(bits);
#else  // newer versions need the type of an element
  return xsimd::bitwise_cast<float>(bits);
#endif
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
    return as_floats((e + Ints(127)) << 23);
  };
  return p * power(half) * power(whole - half);
#endif
}

/// e^r for |r| <= log(2) / 2.
inline Vec<float> exp_near_zero(const Vec<float>& r) {
  using V = Vec<float>;
  V p(1.9875691500e-4f);
  p = xsimd::fma(p, r, V(1.3981999507e-3f));
  p = xsimd::fma(p, r, V(8.3334519073e-3f));
  p = xsimd::fma(p, r, V(4.1665795894e-2f));
  p = xsimd::fma(p, r, V(1.6666665459e-1f));
  p = xsimd::fma(p, r, V(5.0000001201e-1f));
  return xsimd::fma(p, r * r, r + V(1.0f));
}

/// e^x within 1 ulp or so; infinity above 88.73, 0 where the result would be
/// subnormal: these cost a hundred times as much, and masked scores give many.
inline Vec<float> exp_vec(const Vec<float>& x) {
  using V = Vec<float>;
  const V lowest(-87.336544f);  // Logarithm of the least normal number
  // NaN survives: min and max return their second operand when one is NaN.
  const V in = xsimd::max(lowest, xsimd::min(V(89.0f), x));
  const V n = xsimd::nearbyint(in * V(1.44269504088896341f));
  V r = xsimd::fma(n, V(-0.693359375f), in);
  r = xsimd::fma(n, V(2.12194440e-4f), r);
  return xsimd::select(x < lowest, V(0.0f),
                       times_power_of_two(exp_near_zero(r), n));
}

/// exp_vec for x <= 88, bit for bit, with fewer steps: what a softmax needs.
inline Vec<float> exp_vec_small(const Vec<float>& x) {
  using V = Vec<float>;
  const V lowest(-87.336544f);
  const V n = xsimd::nearbyint(x * V(1.44269504088896341f));
  V r = xsimd::fma(n, V(-0.693359375f), x);
  r = xsimd::fma(n, V(2.12194440e-4f), r);
  const V p = exp_near_zero(r);
#ifdef __AVX512F__
  const V y = _mm512_scalef_ps(p, n);
#else
  // One factor is enough from 2^-126 to 2^127.
  using Ints = xsimd::batch<std::int32_t>;
  const V y = p * as_floats((xsimd::to_int(n) + Ints(127)) << 23);
#endif
  return xsimd::select(x < lowest, V(0.0f), y);
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
inline Vec<double> exp_vec_small(const Vec<double>& x) { return exp_vec(x); }

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

/// 1 - erf(x), which keeps its digits where it is small.
inline Vec<float> erfc_vec(const Vec<float>& x) { return xsimd::erfc(x); }
inline Vec<double> erfc_vec(const Vec<double>& x) {
  return each_lane(x, [](double v) { return std::erfc(v); });
}

inline Vec<float> log_vec(const Vec<float>& x) { return xsimd::log(x); }
inline Vec<double> log_vec(const Vec<double>& x) {
  return each_lane(x, [](double v) { return std::log(v); });
}

}  // namespace shardbook::kernels::cpu
