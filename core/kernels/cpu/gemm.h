#pragma once

// The inner loops of a matrix product, for matmul and attention. Read by
// core/kernels/*.cpp only.
//
// The matrices are cut as BLIS does it (Van Zee, van de Geijn 2015): a tile of
// C lives in registers while k runs; B is repacked into panels as wide as the
// tile, A into panels as high.
//
//          panel of B: k x kTileCols
//               |
//   A panel     v
//   kTileRows [ C ]   += one column of A times one row of B, for each k
//
// Every element of C is one chain of fused multiply-adds in increasing k, kept
// in its register or stored between blocks of k. So the bits depend on a row of
// A and a column of B only.

#include <algorithm>
#include <cstdint>

#include "core/kernels/cpu/simd.h"
#include "core/kernels/cpu/transpose_block.h"

namespace shardbook::kernels::cpu {

#ifdef __AVX512F__
constexpr int kTileRows = 12;  // 24 sums and 2 of B in 32 registers
#else
constexpr int kTileRows = 6;  // 12 sums, 2 of B, 1 of A in 16 registers
#endif
constexpr int kTileVecs = 2;
template <typename T>
constexpr std::int64_t kTileCols = kTileVecs* kLanes<T>;

/// Steps of k between stores of C. Measured: a panel of B that outgrows L1
/// streams from L2 in time, and shorter blocks would move C more often.
constexpr std::int64_t kBlockK = 384;

/// The smallest multiple of `to` that is not below n.
inline std::int64_t round_up(std::int64_t n, std::int64_t to) {
  return (n + to - 1) / to * to;
}

/// out[kRows, kVecs vectors] = out (or 0, unless `resume`) + chain over k of
/// a[i, k] * b[k, j].
/// a: element (i, p) at i * kRowStep + p * a_step, or at i * a_step + p for
/// kRowStep = 0; b: row p at p * b_step.
template <typename T, int kRows, int kVecs, std::int64_t kRowStep>
[[gnu::noinline]] void multiply_tile(std::int64_t k, const T* __restrict a,
                                     std::int64_t a_step, const T* __restrict b,
                                     std::int64_t b_step, bool resume, T* out,
                                     std::int64_t ld) {
  using V = Vec<T>;
  V sums[kRows][kVecs];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) sums[i][v] = V(T(0));
  }
  if (resume) {
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        sums[i][v] = load(out + i * ld + v * kLanes<T>);
      }
    }
  }
  const std::int64_t row_step = kRowStep == 0 ? a_step : kRowStep;
  for (std::int64_t p = 0; p < k; ++p) {
    V row[kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) row[v] = load(b + v * kLanes<T>);
    b += b_step;
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const V left(a[i * row_step]);
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        sums[i][v] = xsimd::fma(left, row[v], sums[i][v]);
      }
    }
    a += kRowStep == 0 ? 1 : a_step;
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      store(out + i * ld + v * kLanes<T>, sums[i][v]);
    }
  }
}

/// multiply_tile for a number of rows known at run time.
template <typename T, int kVecs, std::int64_t kRowStep, int kRows = kTileRows>
inline void multiply_rows(std::int64_t rows, std::int64_t k, const T* a,
                          std::int64_t a_step, const T* b, std::int64_t b_step,
                          bool resume, T* out, std::int64_t ld) {
  if constexpr (kRows > 0) {
    if (rows == kRows) {
      multiply_tile<T, kRows, kVecs, kRowStep>(k, a, a_step, b, b_step, resume,
                                               out, ld);
    } else {
      multiply_rows<T, kVecs, kRowStep, kRows - 1>(rows, k, a, a_step, b,
                                                   b_step, resume, out, ld);
    }
  }
}

/// A tile, plus the row `bias` when given: `cols` <= kTileCols columns are
/// written.
template <std::int64_t kRowStep, typename T>
inline void multiply_panel(std::int64_t rows, std::int64_t cols, std::int64_t k,
                           const T* a, std::int64_t a_step, const T* b,
                           std::int64_t b_step, bool resume, T* out,
                           std::int64_t ld, const T* bias = nullptr) {
  const auto multiply = [&](T* to, std::int64_t to_ld) {
    if (cols > kLanes<T>) {
      multiply_rows<T, 2, kRowStep>(rows, k, a, a_step, b, b_step, resume, to,
                                    to_ld);
    } else {
      multiply_rows<T, 1, kRowStep>(rows, k, a, a_step, b, b_step, resume, to,
                                    to_ld);
    }
  };
  if (cols % kLanes<T> == 0 && bias == nullptr) return multiply(out, ld);
  // Through a tile of our own, of which only the true columns are copied.
  alignas(64) T tile[kTileRows * kTileCols<T>];
  if (resume) {
    for (std::int64_t i = 0; i < rows; ++i) {
      const T* from = out + i * ld;
      for (std::int64_t j = 0; j < kTileCols<T>; ++j) {
        tile[i * kTileCols<T> + j] = j < cols ? from[j] : T(0);
      }
    }
  }
  multiply(tile, kTileCols<T>);
  for (std::int64_t i = 0; i < rows; ++i) {
    const T* sums = tile + i * kTileCols<T>;
    T* to = out + i * ld;
    const int width = static_cast<int>(cols),
              step = static_cast<int>(kLanes<T>);
    int j = 0;
    for (; j + step <= width; j += step) {
      Vec<T> sum = load(sums + j);
      if (bias != nullptr) sum = sum + load(bias + j);
      store(to + j, sum);
    }
    for (; j < width; ++j) {
      T sum = sums[j];
      if (bias != nullptr) sum = sum + bias[j];
      to[j] = sum;
    }
  }
}

/// Prefetches the lines of a tile that will be written soon.
template <typename T>
inline void prefetch_tile(const T* out, std::int64_t rows, std::int64_t ld) {
  for (std::int64_t i = 0; i < rows; ++i) {
    for (int v = 0; v < kTileVecs; ++v) {
      __builtin_prefetch(out + i * ld + v * kLanes<T>, 1);
    }
  }
}

/// transpose_into for 16-bit elements, which are widened first, some columns at
/// a time. rows <= kWidth; out[c * kWidth + r].
template <std::int64_t kWidth, typename T>
inline void transpose_widened(const T* x, std::int64_t x_ld, std::int64_t rows,
                              std::int64_t cols, Compute<T>* out) {
  constexpr std::int64_t kDeep = 64;
  alignas(64) Compute<T> wide[kWidth * kDeep];
  for (std::int64_t p = 0; p < cols; p += kDeep) {
    const std::int64_t deep = std::min(kDeep, cols - p);
    for (std::int64_t r = 0; r < rows; ++r) {
      const T* const from = x + r * x_ld + p;
      Compute<T>* const to = wide + r * kDeep;
      std::int64_t c = 0;
      for (; c + kLanes<T> <= deep; c += kLanes<T>) {
        store(to + c, load(from + c));
      }
      if (c < deep) store(to + c, load_part(from + c, deep - c));
    }
    transpose_into(wide, kDeep, rows, deep, out + p * kWidth, kWidth);
  }
}

/// Packs `lines` rows of A (or columns of B) of length k into panels of kWidth
/// side by side, widened: panel q holds out[p * kWidth + i] = x(q * kWidth + i,
/// p), zeros for missing lines, and is k * kWidth long.
/// Element (i, p) lies at i * line + p * step; one of the two strides is 1.
template <std::int64_t kWidth, typename T>
inline void pack_panels(const T* x, std::int64_t line, std::int64_t step,
                        std::int64_t lines, std::int64_t k, Compute<T>* out) {
  using S = Compute<T>;
  if (line == 1) {
    // A few rows at a time over all panels: rows of a large matrix start in the
    // same sets of L1, which keep no more of them until the next panel.
    constexpr std::int64_t kStrip = 8;
    for (std::int64_t p = 0; p < k; p += kStrip) {
      const std::int64_t end = std::min(k, p + kStrip);
      for (std::int64_t i = 0; i < lines; i += kWidth) {
        const std::int64_t width = std::min(kWidth, lines - i);
        S* const panel = out + i * k;
        for (std::int64_t r = p; r < end; ++r) {
          const T* const from = x + r * step + i;
          S* const to = panel + r * kWidth;
          if (width == kWidth && kWidth % kLanes<T> == 0) {
            for (std::int64_t j = 0; j < kWidth; j += kLanes<T>) {
              store(to + j, load(from + j));
            }
          } else {
            for (std::int64_t j = 0; j < kWidth; ++j) {
              to[j] = j < width ? widen(from[j]) : S(0);
            }
          }
        }
      }
    }
    return;
  }
  for (std::int64_t i = 0; i < lines; i += kWidth) {
    const std::int64_t width = std::min(kWidth, lines - i);
    const T* const from = x + i * line;
    S* const panel = out + i * k;
    if (step == 1) {
      if constexpr (std::is_same_v<T, S>) {
        transpose_into(from, line, width, k, panel, kWidth);
      } else {
        transpose_widened<kWidth>(from, line, width, k, panel);
      }
      for (std::int64_t p = 0; width < kWidth && p < k; ++p) {
        std::fill(panel + p * kWidth + width, panel + (p + 1) * kWidth, S(0));
      }
      continue;
    }
    for (std::int64_t p = 0; p < k; ++p) {
      for (std::int64_t j = 0; j < kWidth; ++j) {
        panel[p * kWidth + j] =
            j < width ? widen(from[j * line + p * step]) : S(0);
      }
    }
  }
}

}  // namespace shardbook::kernels::cpu
