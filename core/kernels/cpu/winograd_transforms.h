#pragma once

// The transforms of one patch or window, for as many channels as a vector has.
// winograd.h has the matrices. Read by winograd.cpp only.

#include "core/kernels/cpu/simd.h"

namespace shardbook::kernels::cpu::winograd {

using V = Vec<float>;

/// d[16] = B' d B for a 4x4 patch d[16].
inline void transform_patch(V* d) {
  const auto apply = [](V* x, std::int64_t step) {
    const V a = x[0], b = x[step], c = x[2 * step], last = x[3 * step];
    x[0] = a - c;
    x[step] = b + c;
    x[2 * step] = c - b;
    x[3 * step] = b - last;
  };
#pragma GCC unroll 4
  for (std::int64_t j = 0; j < 4; ++j) apply(d + j, 4);
#pragma GCC unroll 4
  for (std::int64_t i = 0; i < 4; ++i) apply(d + 4 * i, 1);
}

/// y[4] = A' m A for m[16].
inline void transform_to_outputs(const V* m, V* y) {
  V t[8];
#pragma GCC unroll 4
  for (std::int64_t j = 0; j < 4; ++j) {
    const V both = m[4 + j] + m[8 + j];
    const V difference = m[4 + j] - m[8 + j];
    t[j] = m[j] + both;
    t[4 + j] = difference - m[12 + j];
  }
#pragma GCC unroll 4
  for (std::int64_t i = 0; i < 2; ++i) {
    const V both = t[4 * i + 1] + t[4 * i + 2];
    const V difference = t[4 * i + 1] - t[4 * i + 2];
    y[2 * i] = t[4 * i] + both;
    y[2 * i + 1] = difference - t[4 * i + 3];
  }
}

/// n[16] = A y A' for y[4], the transpose of the former.
inline void transform_from_outputs(const V* y, V* n) {
  V t[8];
#pragma GCC unroll 4
  for (std::int64_t j = 0; j < 2; ++j) {
    t[j] = y[j];
    t[2 + j] = y[j] + y[2 + j];
    t[4 + j] = y[j] - y[2 + j];
    t[6 + j] = -y[2 + j];
  }
#pragma GCC unroll 4
  for (std::int64_t i = 0; i < 4; ++i) {
    const V a = t[2 * i], b = t[2 * i + 1];
    n[4 * i] = a;
    n[4 * i + 1] = a + b;
    n[4 * i + 2] = a - b;
    n[4 * i + 3] = -b;
  }
}

/// u[16] = G g G' for a window g[9].
inline void transform_window(const V* g, V* u) {
  const V half(0.5f);
  const auto apply = [&](const V& a, const V& b, const V& c, V* out,
                         std::int64_t step) {
    const V sum = a + c;
    out[0] = a;
    out[step] = half * (sum + b);
    out[2 * step] = half * (sum - b);
    out[3 * step] = c;
  };
  V t[12];
#pragma GCC unroll 4
  for (std::int64_t j = 0; j < 3; ++j)
    apply(g[j], g[3 + j], g[6 + j], t + j, 3);
#pragma GCC unroll 4
  for (std::int64_t i = 0; i < 4; ++i) {
    apply(t[3 * i], t[3 * i + 1], t[3 * i + 2], u + 4 * i, 1);
  }
}

/// g[9] = G' u G for u[16], the transpose of the former.
inline void transform_to_window(const V* u, V* g) {
  const V half(0.5f);
  const auto apply = [&](const V* in, std::int64_t step, V* out,
                         std::int64_t out_step) {
    const V b = half * in[step], c = half * in[2 * step];
    out[0] = in[0] + b + c;
    out[out_step] = b - c;
    out[2 * out_step] = b + c + in[3 * step];
  };
  V t[12];
#pragma GCC unroll 4
  for (std::int64_t j = 0; j < 4; ++j) apply(u + j, 4, t + j, 4);
#pragma GCC unroll 4
  for (std::int64_t i = 0; i < 3; ++i) apply(t + 4 * i, 1, g + 3 * i, 1);
}

}  // namespace shardbook::kernels::cpu::winograd
