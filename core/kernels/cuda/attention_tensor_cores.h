#pragma once

// Shared by both passes of attention on tensor cores. Read by
// attention_tensor_cores*.cu only.

#include <cstdint>
#include <type_traits>

#include "core/kernels/cuda/attention_common.h"
#include "core/kernels/cuda/mma_tiles.h"

namespace shardbook::kernels::cuda {

constexpr int kMmaWarps = 4;
constexpr int kMmaThreads = kMmaWarps * kWarp;
constexpr double kLog2E = 1.4426950408889634074;

__device__ inline int warp_of_block() {
  return static_cast<int>(threadIdx.x) / kWarp;
}
/// The first of a lane's rows of a block of 16 (the other is 8 below), and of
/// its two columns of each block of 8.
__device__ inline int row_of_lane() {
  return static_cast<int>(threadIdx.x) % kWarp / 4;
}
__device__ inline int column_of_lane() {
  return static_cast<int>(threadIdx.x) % 4 * 2;
}

/// Whether the mask keeps element `index`, and the one after it in the row. The
/// random bits of four elements come at once.
__device__ inline void keep_two(const DropoutMask& mask, std::uint64_t index,
                                bool (&keeps)[2]) {
  if (mask.place.step[3] != 1 || index % 4 == 3) {
    keeps[0] = mask.keeps(index);
    keeps[1] = mask.keeps(index + mask.place.step[3]);
    return;
  }
  const auto bits = random_block(mask.key, index / 4);
  const int i = static_cast<int>(index % 4);
  keeps[0] = (i == 0 ? bits[0] : i == 1 ? bits[1] : bits[2]) >= mask.threshold;
  keeps[1] = (i == 0 ? bits[1] : i == 1 ? bits[2] : bits[3]) >= mask.threshold;
}

/// Zeroes the elements that the mask drops. x holds a lane's elements of
/// queries `row` and row + 8, and of kCols keys from `key` on. The loop that
/// draws bits is not unrolled: its code is long.
template <int kCols>
__device__ void drop_keys(const DropoutMask& mask, std::int64_t b,
                          std::int64_t h, std::int64_t row, std::int64_t key,
                          float (&x)[kCols / 8][4]) {
  static_assert(kCols / 8 * 4 <= 32, "a bit for each element");
  const std::uint64_t start[2] = {
      mask.index(b, h, row, key + column_of_lane()),
      mask.index(b, h, row + 8, key + column_of_lane())};
  std::uint32_t kept = 0;
#pragma unroll 1
  for (int i = 0; i < kCols / 4; ++i) {
    bool keeps[2];
    keep_two(
        mask,
        (i % 2 == 0 ? start[0] : start[1]) + mask.place.step[3] * (i / 2 * 8),
        keeps);
    kept |= (keeps[0] | keeps[1] << 1) << (2 * i);
  }
#pragma unroll
  for (int n = 0; n < kCols / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if ((kept >> (4 * n + e) & 1) == 0) x[n][e] = 0.0f;
    }
  }
}

/// How many of kCols keys from `key` on query `row` sees.
template <int kCols>
__device__ int seen_of_tile(const AttentionShape& s, std::int64_t row,
                            std::int64_t key) {
  const std::int64_t seen = s.visible_keys(row) - key;
  return seen < 0 ? 0 : seen < kCols ? static_cast<int>(seen) : kCols;
}

/// Calls body with head_dim as a constant.
template <typename Body>
void with_head_dim(std::int64_t head_dim, Body body) {
  switch (head_dim) {
    case 32:
      return body(std::integral_constant<int, 32>());
    case 64:
      return body(std::integral_constant<int, 64>());
    case 96:
      return body(std::integral_constant<int, 96>());
    default:
      return body(std::integral_constant<int, 128>());
  }
}

}  // namespace shardbook::kernels::cuda
