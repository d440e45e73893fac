#pragma once

// __nv_bfloat16 for the emulator: rounding to nearest even, as on the device.

#include <bit>
#include <cmath>
#include <cstdint>

struct __nv_bfloat16 {
  std::uint16_t bits;

  __nv_bfloat16() = default;
  __nv_bfloat16(float x) : bits(round(x)) {}
  __nv_bfloat16(double x) : bits(round(to_odd(x))) {}
  __nv_bfloat16(int x) : __nv_bfloat16(static_cast<double>(x)) {}
  operator float() const {
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  }
  __nv_bfloat16& operator+=(__nv_bfloat16 other) {
    return *this = static_cast<float>(*this) + static_cast<float>(other);
  }

 private:
  static std::uint16_t round(float x) {
    if (x != x) return 0x7fff;
    const auto all = std::bit_cast<std::uint32_t>(x);
    return static_cast<std::uint16_t>((all + 0x7fffu + (all >> 16 & 1u)) >> 16);
  }
  // To f32 with the last bit set where something was lost: rounding once more
  // is then as good as rounding once.
  static float to_odd(double x) {
    float y = static_cast<float>(x);
    if (static_cast<double>(y) == x || x != x || std::isinf(y)) return y;
    if (std::fabs(static_cast<double>(y)) > std::fabs(x)) {
      y = std::nextafter(y, 0.0f);
    }
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(y) | 1u);
  }
};

inline __nv_bfloat16 __float2bfloat16(float x) { return __nv_bfloat16(x); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return __nv_bfloat16(x); }
inline __nv_bfloat16 __double2bfloat16(double x) { return __nv_bfloat16(x); }
inline float __bfloat162float(__nv_bfloat16 x) { return x; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) {
  return std::bit_cast<__nv_bfloat16>(bits);
}
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }

struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__nv_bfloat16(x), __nv_bfloat16(y)};
}
