#pragma once

// __nv_bfloat16 for the emulator: rounding to nearest even, as on the device.

#include <bit>
#include <cstdint>

struct __nv_bfloat16 {
  std::uint16_t bits;

  __nv_bfloat16() = default;
  __nv_bfloat16(float x) : bits(round(x)) {}
  operator float() const {
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  }

 private:
  static std::uint16_t round(float x) {
    if (x != x) return 0x7fff;
    const auto all = std::bit_cast<std::uint32_t>(x);
    return static_cast<std::uint16_t>((all + 0x7fffu + (all >> 16 & 1u)) >> 16);
  }
};

inline __nv_bfloat16 __float2bfloat16_rn(float x) { return __nv_bfloat16(x); }
inline float __bfloat162float(__nv_bfloat16 x) { return x; }
