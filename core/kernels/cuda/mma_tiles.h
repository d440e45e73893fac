#pragma once

// Rows of matrices on tensor cores: from global to shared memory, into products
// by one warp, and back. mma.h says how a warp holds its blocks.

#include <cstdint>

#include "core/kernels/cuda/mma.h"

namespace shardbook::kernels::cuda {

#if SHARDBOOK_HAS_MMA

/// Starts the copies of rows [first, first + kRows) of a matrix with `rows`
/// rows to the tile's rows from `to` on, by all kThreads threads of a block.
template <int kRows, int kDim, int kThreads, typename T, typename Tile>
__device__ void copy_rows(const T* x, std::int64_t stride, std::int64_t first,
                          std::int64_t rows, Tile& tile, int to) {
  constexpr int kPieces = kDim / 8;  // of a row
#pragma unroll
  for (int i = 0; i < kRows * kPieces; i += kThreads) {
    const int piece = i + static_cast<int>(threadIdx.x);
    const int row = piece / kPieces, column = piece % kPieces * 8;
    if (kRows * kPieces % kThreads != 0 && row >= kRows) break;
    const bool inside = first + row < rows;
    const T* const from = inside ? x + (first + row) * stride + column : x;
    copy_16_bytes(tile, (to + row) * kRowWords<kDim> + column / 2, from,
                  inside);
  }
}

/// A = rows [first, first + 16) of a matrix with `rows` rows in global memory.
template <int kDim, typename T>
__device__ void load_left(const T* x, std::int64_t stride, std::int64_t first,
                          std::int64_t rows, Word (&a)[kDim / 16][4]) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::int64_t row = first + lane / 4 + 8 * half;
    const T* const from = x + row * stride + lane % 4 * 2;
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      a[k][half] = a[k][half + 2] = 0;
      if (row < rows) {
        a[k][half] = load_word(from + 16 * k);
        a[k][half + 2] = load_word(from + 16 * k + 8);
      }
    }
  }
}

/// C += A X^T for rows [row, row + kCols) of a tile X, and kBlocks blocks of 16
/// rows of A and C.
template <typename T, int kDim, int kCols, int kBlocks, typename Tile>
__device__ void multiply_across(const Word (&a)[kBlocks][kDim / 16][4],
                                Tile& tile, int row,
                                float (&c)[kBlocks][kCols / 8][4]) {
#pragma unroll
  for (int n = 0; n < kCols / 8; ++n) {
#pragma unroll
    for (int k = 0; k < kDim / 32; ++k) {
      Word b[4];
      load_across<kDim>(tile, row + 8 * n, 32 * k, b);
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        multiply_block<T>(c[i][n], a[i][2 * k], b[0], b[1]);
        multiply_block<T>(c[i][n], a[i][2 * k + 1], b[2], b[3]);
      }
    }
  }
}

/// C += A X for rows [row, row + kCols) of a tile X. A is given in f32 as
/// multiply_across left it, and rounded to T.
template <typename T, int kDim, int kCols, int kBlocks, typename Tile>
__device__ void multiply_along(const float (&a)[kBlocks][kCols / 8][4],
                               Tile& tile, int row,
                               float (&c)[kBlocks][kDim / 8][4]) {
#pragma unroll
  for (int k = 0; k < kCols / 16; ++k) {
    Word packed[kBlocks][4];
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const auto& left = a[i][2 * k];
      const auto& right = a[i][2 * k + 1];
      packed[i][0] = pack<T>(left[0], left[1]);
      packed[i][1] = pack<T>(left[2], left[3]);
      packed[i][2] = pack<T>(right[0], right[1]);
      packed[i][3] = pack<T>(right[2], right[3]);
    }
#pragma unroll
    for (int n = 0; n < kDim / 16; ++n) {
      Word b[4];
      load_along<kDim>(tile, row + 16 * k, 16 * n, b);
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        multiply_block<T>(c[i][2 * n], packed[i], b[0], b[1]);
        multiply_block<T>(c[i][2 * n + 1], packed[i], b[2], b[3]);
      }
    }
  }
}

/// Rows [first, first + 16) of x = factor * C, or += it; a lane has the factors
/// of its two rows. Rows from `rows` on do not exist.
template <int kDim, typename T>
__device__ void store_rows(const float (&c)[kDim / 8][4],
                           const float (&factor)[2], T* x, std::int64_t stride,
                           std::int64_t first, std::int64_t rows,
                           bool accumulate) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::int64_t row = first + lane / 4 + 8 * half;
    if (row >= rows) continue;
    T* const to = x + row * stride + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      float low = c[n][2 * half] * factor[half];
      float high = c[n][2 * half + 1] * factor[half];
      if (accumulate) {
        const Word word = load_word(to + 8 * n);
        low += unpack<T>(word, 0), high += unpack<T>(word, 1);
      }
      store_word(to + 8 * n, pack<T>(low, high));
    }
  }
}

#endif

}  // namespace shardbook::kernels::cuda
