#pragma once

// Conversions between the types of elements.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/kernels/cuda/kernel_launch.h"

namespace shardbook::kernels::cuda {

/// Rounds f64 to f32, to odd: rounding that to 16 bits equals rounding once.
__device__ inline float round_to_odd(double x) {
  float nearest = static_cast<float>(x);
  if (static_cast<double>(nearest) == x || !(std::fabs(x) < 1e38)) {
    return nearest;
  }
  std::uint32_t bits;
  std::memcpy(&bits, &nearest, sizeof(bits));
  const bool away = std::fabs(static_cast<double>(nearest)) > std::fabs(x);
  if (away) bits -= 1;  // Towards zero
  bits |= 1u;
  std::memcpy(&nearest, &bits, sizeof(bits));
  return nearest;
}

/// Floats round to nearest even, integers truncate.
template <typename T>
__device__ T from_double(double x) {
  if constexpr (std::is_arithmetic_v<T>) {
    return static_cast<T>(x);
  } else {
    return narrow<T>(round_to_odd(x));
  }
}

/// Integers become floats through f64, as on the CPU.
template <typename From, typename To>
__device__ To convert(From x) {
  if constexpr (std::is_integral_v<From> && std::is_integral_v<To>) {
    return static_cast<To>(x);
  } else if constexpr (std::is_integral_v<From> ||
                       std::is_same_v<From, double>) {
    return from_double<To>(static_cast<double>(x));
  } else if constexpr (std::is_integral_v<To> || std::is_same_v<To, double>) {
    return static_cast<To>(widen(x));
  } else {
    return narrow<To>(widen(x));
  }
}

}  // namespace shardbook::kernels::cuda
