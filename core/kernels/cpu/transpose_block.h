#pragma once

// Small transposes, from cache to cache. Read by core/kernels/*.cpp only.

#include <cstdint>

#include "core/kernels/cpu/simd.h"

namespace shardbook::kernels::cpu {

#ifdef __AVX512F__
/// out[c * out_ld + r] = x[r * x_ld + c] for r < 4 * kQuads, c < 16, in up to
/// four 4 x 16 strips, each transposed within its lanes. Not inlined: in a
/// large function the strips would be spilled to the stack.
template <int kQuads>
[[gnu::noinline]] inline void transpose_16(const float* x, std::int64_t x_ld,
                                           float* out, std::int64_t out_ld) {
  static_assert(kQuads >= 1 && kQuads <= 4);
  // Strip q holds rows 4q .. 4q+3; after the shuffles column c of the strip is
  // lane c / 4 of t[q][c % 4].
  __m512 t[4][4];
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) {
    if (q < kQuads) {
      const __m512 r0 = _mm512_loadu_ps(x + (4 * q + 0) * x_ld);
      const __m512 r1 = _mm512_loadu_ps(x + (4 * q + 1) * x_ld);
      const __m512 r2 = _mm512_loadu_ps(x + (4 * q + 2) * x_ld);
      const __m512 r3 = _mm512_loadu_ps(x + (4 * q + 3) * x_ld);
      const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(r0, r1));
      const __m512d b = _mm512_castps_pd(_mm512_unpackhi_ps(r0, r1));
      const __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(r2, r3));
      const __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(r2, r3));
      t[q][0] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
      t[q][1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
      t[q][2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
      t[q][3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
    } else {
      t[q][0] = t[q][1] = t[q][2] = t[q][3] = _mm512_setzero_ps();
    }
  }
  // Column 4 * lane + j gathers that lane of the four strips.
  const __mmask16 mask = static_cast<__mmask16>((1u << (4 * kQuads)) - 1u);
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512 low01 = _mm512_shuffle_f32x4(t[0][j], t[1][j], 0x44);
    const __m512 low23 = _mm512_shuffle_f32x4(t[2][j], t[3][j], 0x44);
    const __m512 high01 = _mm512_shuffle_f32x4(t[0][j], t[1][j], 0xee);
    const __m512 high23 = _mm512_shuffle_f32x4(t[2][j], t[3][j], 0xee);
    const __m512 c0 = _mm512_shuffle_f32x4(low01, low23, 0x88);
    const __m512 c1 = _mm512_shuffle_f32x4(low01, low23, 0xdd);
    const __m512 c2 = _mm512_shuffle_f32x4(high01, high23, 0x88);
    const __m512 c3 = _mm512_shuffle_f32x4(high01, high23, 0xdd);
    _mm512_mask_storeu_ps(out + (0 + j) * out_ld, mask, c0);
    _mm512_mask_storeu_ps(out + (4 + j) * out_ld, mask, c1);
    _mm512_mask_storeu_ps(out + (8 + j) * out_ld, mask, c2);
    _mm512_mask_storeu_ps(out + (12 + j) * out_ld, mask, c3);
  }
}
#elif defined(__AVX2__)
/// out[c * out_ld + r] = x[r * x_ld + c] for r, c < 8.
[[gnu::noinline]] inline void transpose_8(const float* x, std::int64_t x_ld,
                                          float* out, std::int64_t out_ld) {
  // Columns 4h .. 4h+3: row r in the lower lane, row r + 4 in the upper one.
#pragma GCC unroll 2
  for (int h = 0; h < 8; h += 4) {
    const auto rows = [&](int r) {
      const float* const from = x + r * x_ld + h;
      return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(from)),
                                  _mm_loadu_ps(from + 4 * x_ld), 1);
    };
    const __m256 r0 = rows(0), r1 = rows(1), r2 = rows(2), r3 = rows(3);
    const __m256 a = _mm256_unpacklo_ps(r0, r1), b = _mm256_unpackhi_ps(r0, r1);
    const __m256 c = _mm256_unpacklo_ps(r2, r3), d = _mm256_unpackhi_ps(r2, r3);
    float* const to = out + h * out_ld;
    _mm256_storeu_ps(to, _mm256_shuffle_ps(a, c, 0x44));
    _mm256_storeu_ps(to + out_ld, _mm256_shuffle_ps(a, c, 0xee));
    _mm256_storeu_ps(to + 2 * out_ld, _mm256_shuffle_ps(b, d, 0x44));
    _mm256_storeu_ps(to + 3 * out_ld, _mm256_shuffle_ps(b, d, 0xee));
  }
}
#endif

/// out[c * out_ld + r] = x[r * x_ld + c] for r < rows, c < cols.
template <typename T>
inline void transpose_into(const T* x, std::int64_t x_ld, std::int64_t rows,
                           std::int64_t cols, T* out, std::int64_t out_ld) {
  std::int64_t r = 0;
#ifdef __AVX512F__
  if constexpr (std::is_same_v<T, float>) {
    const std::int64_t whole = cols / 16 * 16;
    for (; r + 4 <= rows;) {
      const std::int64_t quads = std::min<std::int64_t>(4, (rows - r) / 4);
      for (std::int64_t c = 0; c < whole; c += 16) {
        const float* from = x + r * x_ld + c;
        float* to = out + c * out_ld + r;
        if (quads == 4) {
          transpose_16<4>(from, x_ld, to, out_ld);
        } else if (quads == 3) {
          transpose_16<3>(from, x_ld, to, out_ld);
        } else if (quads == 2) {
          transpose_16<2>(from, x_ld, to, out_ld);
        } else {
          transpose_16<1>(from, x_ld, to, out_ld);
        }
      }
      for (std::int64_t c = whole; c < cols; ++c) {
        for (std::int64_t i = r; i < r + 4 * quads; ++i) {
          out[c * out_ld + i] = x[i * x_ld + c];
        }
      }
      r += 4 * quads;
    }
  }
#elif defined(__AVX2__)
  if constexpr (std::is_same_v<T, float>) {
    const std::int64_t whole = cols / 8 * 8;
    for (; r + 8 <= rows; r += 8) {
      for (std::int64_t c = 0; c < whole; c += 8) {
        transpose_8(x + r * x_ld + c, x_ld, out + c * out_ld + r, out_ld);
      }
      for (std::int64_t c = whole; c < cols; ++c) {
        for (std::int64_t i = r; i < r + 8; ++i) {
          out[c * out_ld + i] = x[i * x_ld + c];
        }
      }
    }
  }
#endif
  // Blocks of 8 x 8 keep the lines that are read and written in L1.
  for (; r < rows; r += 8) {
    const std::int64_t r_end = std::min(rows, r + 8);
    for (std::int64_t c = 0; c < cols; c += 8) {
      const std::int64_t c_end = std::min(cols, c + 8);
      for (std::int64_t j = c; j < c_end; ++j) {
        for (std::int64_t i = r; i < r_end; ++i) {
          out[j * out_ld + i] = x[i * x_ld + j];
        }
      }
    }
  }
}

}  // namespace shardbook::kernels::cpu
