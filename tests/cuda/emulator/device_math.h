#pragma once

// Bits, vectors of numbers, and the mathematical functions that only device
// code knows. The fast ones (__expf, ...) are as exact here as the slow ones.

#include <math.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

// ---- Bits.

inline int __popc(unsigned x) { return std::popcount(x); }
inline int __popcll(unsigned long long x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __clzll(long long x) {
  return std::countl_zero(static_cast<unsigned long long>(x));
}
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(std::uint64_t{a} * b >> 32);
}
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline long long __double_as_longlong(double x) {
  return std::bit_cast<long long>(x);
}
inline double __longlong_as_double(long long x) {
  return std::bit_cast<double>(x);
}
template <typename T>
T __ldg(const T* address) {
  return *address;
}

// ---- Vectors, aligned as on the device.

#define EMULATOR_VECTORS(T, name, bytes)                     \
  struct alignas(2 * bytes) name##2 {                        \
    T x, y;                                                  \
  };                                                         \
  struct alignas(bytes > 4 ? 16 : 4 * bytes) name##4 {       \
    T x, y, z, w;                                            \
  };                                                         \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; } \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMULATOR_VECTORS(float, float, 4)
EMULATOR_VECTORS(double, double, 8)
EMULATOR_VECTORS(int, int, 4)
EMULATOR_VECTORS(unsigned, uint, 4)
EMULATOR_VECTORS(unsigned short, ushort, 2)
EMULATOR_VECTORS(long long, longlong, 8)
#undef EMULATOR_VECTORS

// ---- Mathematics.

// The C library declares these names without defining them.
#define __expf(x) ::expf(x)
#define __exp10f(x) ::exp10f(x)
#define __logf(x) ::logf(x)
#define __log2f(x) ::log2f(x)
#define __log10f(x) ::log10f(x)
#define __powf(x, y) ::powf(x, y)
#define __sinf(x) ::sinf(x)
#define __cosf(x) ::cosf(x)
#define __tanf(x) ::tanf(x)
#define __tanhf(x) ::tanhf(x)
#define __sincosf(x, sine, cosine) ::sincosf(x, sine, cosine)

inline float __fdividef(float x, float y) { return x / y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __frsqrt_rn(float x) { return 1.0f / std::sqrt(x); }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dsub_rn(double x, double y) { return x - y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline double __ddiv_rn(double x, double y) { return x / y; }
inline double __dsqrt_rn(double x) { return std::sqrt(x); }
inline double __fma_rn(double x, double y, double z) {
  return std::fma(x, y, z);
}
inline float __saturatef(float x) { return x > 0 ? std::min(x, 1.0f) : 0.0f; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }

// sin and cos of pi x, exact where x is a multiple of 1/2.
inline double sinpi(double x) {
  const double r = std::remainder(x, 2.0);
  if (r == 1.0 || r == -1.0 || r == 0.0) return std::copysign(0.0, x);
  return std::sin(r * 3.14159265358979323846);
}
inline double cospi(double x) {
  const double r = std::fabs(std::remainder(x, 2.0));
  return r == 0.5 ? 0.0 : std::cos(r * 3.14159265358979323846);
}
inline float sinpif(float x) { return static_cast<float>(sinpi(x)); }
inline float cospif(float x) { return static_cast<float>(cospi(x)); }
inline void sincospi(double x, double* sine, double* cosine) {
  *sine = sinpi(x), *cosine = cospi(x);
}
inline void sincospif(float x, float* sine, float* cosine) {
  *sine = sinpif(x), *cosine = cospif(x);
}

inline int __float2int_rn(float x) { return static_cast<int>(::rintf(x)); }
inline int __float2int_rz(float x) { return static_cast<int>(x); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
inline float __ll2float_rn(long long x) { return static_cast<float>(x); }
inline float __double2float_rn(double x) { return static_cast<float>(x); }

// Device code finds min and max without a namespace.
#define EMULATOR_MIN_MAX(T)                        \
  inline T min(T a, T b) { return b < a ? b : a; } \
  inline T max(T a, T b) { return a < b ? b : a; }
EMULATOR_MIN_MAX(int)
EMULATOR_MIN_MAX(unsigned)
EMULATOR_MIN_MAX(long)
EMULATOR_MIN_MAX(unsigned long)
EMULATOR_MIN_MAX(long long)
EMULATOR_MIN_MAX(unsigned long long)
#undef EMULATOR_MIN_MAX
inline float min(float a, float b) { return ::fminf(a, b); }
inline float max(float a, float b) { return ::fmaxf(a, b); }
inline double min(double a, double b) { return ::fmin(a, b); }
inline double max(double a, double b) { return ::fmax(a, b); }
