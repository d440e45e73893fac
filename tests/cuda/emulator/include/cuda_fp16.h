#pragma once

// __half for the emulator: rounding to nearest even, as on the device.

#include <bit>
#include <cmath>
#include <cstdint>

struct __half {
  std::uint16_t bits;

  __half() = default;
  __half(float x) : bits(round(x)) {}
  __half(double x) : bits(round(x)) {}
  __half(int x) : __half(static_cast<float>(x)) {}
  operator float() const {
    return static_cast<float>(std::bit_cast<_Float16>(bits));
  }
  __half& operator+=(__half other) {
    return *this = static_cast<float>(*this) + static_cast<float>(other);
  }

 private:
  template <typename T>
  static std::uint16_t round(T x) {
    if (x != x) return 0x7fff;
    return std::bit_cast<std::uint16_t>(static_cast<_Float16>(x));
  }
};
using half = __half;

inline __half __float2half(float x) { return __half(x); }
inline __half __float2half_rn(float x) { return __half(x); }
inline __half __double2half(double x) { return __half(x); }
inline float __half2float(__half x) { return x; }
inline __half __ushort_as_half(unsigned short bits) {
  return std::bit_cast<__half>(bits);
}
inline unsigned short __half_as_ushort(__half x) { return x.bits; }

struct alignas(4) __half2 {
  __half x, y;
};
using half2 = __half2;
inline __half2 __floats2half2_rn(float x, float y) {
  return {__half(x), __half(y)};
}
inline __half2 make_half2(__half x, __half y) { return {x, y}; }
inline __half __low2half(__half2 v) { return v.x; }
inline __half __high2half(__half2 v) { return v.y; }
