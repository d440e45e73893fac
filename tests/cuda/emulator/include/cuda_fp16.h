#pragma once

// __half for the emulator: rounding to nearest even, as on the device.

#include <bit>
#include <cstdint>

struct __half {
  std::uint16_t bits;

  __half() = default;
  __half(float x)
      : bits(x != x ? 0x7fff
                    : std::bit_cast<std::uint16_t>(static_cast<_Float16>(x))) {}
  operator float() const {
    return static_cast<float>(std::bit_cast<_Float16>(bits));
  }
};

inline __half __float2half_rn(float x) { return __half(x); }
inline float __half2float(__half x) { return x; }
