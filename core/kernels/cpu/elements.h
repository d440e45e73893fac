#pragma once

// Inside the kernels: element types, including 16-bit ones that widen to f32,
// and functions called by type. Read by core/kernels/*.cpp only.

#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "core/check.h"
#include "core/dtype.h"

#ifdef __F16C__
#include <immintrin.h>
#endif

namespace shardbook::kernels::cpu {

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

/// f32, f64 and integers are computed in themselves.
template <typename T, typename = std::enable_if_t<std::is_arithmetic_v<T>>>
inline T widen(T x) {
  return x;
}

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

/// Rounds f64 to f32, to odd: rounding that to 16 bits equals rounding once.
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

/// The type in which arithmetic on T is done.
template <typename T>
using Compute =
    std::conditional_t<std::is_same_v<T, BF16> || std::is_same_v<T, F16>, float,
                       T>;

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

}  // namespace shardbook::kernels::cpu
