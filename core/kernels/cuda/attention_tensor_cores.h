#pragma once

// What both passes of attention on tensor cores share. Read by
// attention_tensor_cores*.cu only.

#include <cstdint>
#include <type_traits>

#include "core/kernels/cuda/attention_common.h"
#include "core/kernels/cuda/mma.h"

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

/// Sets what the mask drops to zero. x holds a lane's elements of queries `row`
/// and row + 8, and of kCols keys from `key` on.
template <int kCols>
__device__ void drop_keys(const DropoutMask& mask, std::int64_t b,
                          std::int64_t h, std::int64_t row, std::int64_t key,
                          float (&x)[kCols / 8][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::uint64_t start =
        mask.index(b, h, row + 8 * half, key + column_of_lane());
#pragma unroll
    for (int n = 0; n < kCols / 8; ++n) {
      bool keeps[2];
      keep_two(mask, start + mask.place.step[3] * (8 * n), keeps);
      if (!keeps[0]) x[n][2 * half] = 0.0f;
      if (!keeps[1]) x[n][2 * half + 1] = 0.0f;
    }
  }
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
