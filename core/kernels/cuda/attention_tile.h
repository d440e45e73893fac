#pragma once

// The tiles of attention on the ordinary cores. Read by attention.cu and
// attention_backward.cu only.
//
// A block of four warps owns a tile of 32 rows and up to 128 columns of what it
// computes, and walks over tiles of 32 keys (or queries). In a tile of scores,
// a warp owns 8 rows and a lane one column:
//
//              32 columns, one per lane
//            +--------------------------+
//     warp 0 | rows 0 .. 7              |   so that the sums of a row are
//     warp 1 | rows 8 .. 15             |   shuffles within a warp
//     ...    |                          |
//            +--------------------------+
//
// Nothing is added by atomics: each element of out, dq, dk and dv has one
// owner, which adds in increasing order. Heads that are wider than 128 are cut
// into chunks of 128 columns, each with blocks of its own that compute the
// scores anew.
//
// Cost, forward: 4 q_rows k_rows head_dim flops per head, half of it when
// causal; backward, two kernels: 14 instead of 10, because both need the scores
// and their gradients. Reads of shared memory bound it: 9 for 8 multiply-adds.
// It should reach about a fourth of the f32 peak (not measured).

#include <cstdint>
#include <type_traits>

#include "core/kernels/cuda/attention_common.h"
#include "core/kernels/cuda/kernel_launch.h"

namespace shardbook::kernels::cuda {

constexpr int kTile = 32;
constexpr int kThreads = 128;
constexpr int kRows = kTile / (kThreads / kWarp);  // rows of one thread
constexpr int kLd = kTile + 1;  // columns of a tile lie in different banks

template <typename S>
using Tile = SharedArray<S, kTile * kLd>;

__device__ inline int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
__device__ inline int first_row() {
  return static_cast<int>(threadIdx.x) / kWarp * kRows;
}

// Rows of a matrix in memory, from the first that a tile holds.
template <typename T>
struct TileRows {
  const T* data;
  std::int64_t stride, count;
};

template <typename T>
__device__ TileRows<T> rows_from(const T* head, std::int64_t stride,
                                 std::int64_t first, std::int64_t end) {
  return {head + first * stride, stride, end - first};
}

// Columns [from, from + 32); zeros outside of the matrix.
template <typename T>
__device__ void load_tile(const TileRows<T>& x, std::int64_t from,
                          std::int64_t dim, Tile<Compute<T>>& tile) {
  for (int i = threadIdx.x; i < kTile * kTile; i += kThreads) {
    const int row = i / kTile, column = i % kTile;
    const bool inside = row < x.count && from + column < dim;
    tile[row * kLd + column] =
        inside ? widen(x.data[row * x.stride + from + column]) : Compute<T>(0);
  }
}

// sums[r] += the product of row first_row() + r of x and row lane() of y.
template <typename T>
__device__ void add_products(const TileRows<T>& x, const TileRows<T>& y,
                             std::int64_t dim, Tile<Compute<T>>& left,
                             Tile<Compute<T>>& right,
                             Compute<T> (&sums)[kRows]) {
  for (std::int64_t from = 0; from < dim; from += kTile) {
    __syncthreads();  // No warp reads the tiles any more
    load_tile(x, from, dim, left);
    load_tile(y, from, dim, right);
    __syncthreads();
#pragma unroll 8
    for (int d = 0; d < kTile; ++d) {
      const Compute<T> other = right[lane() * kLd + d];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        sums[r] += left[(first_row() + r) * kLd + d] * other;
      }
    }
  }
}

// sums[c][r] += weights of row first_row() + r times column lane() of chunk c
// of x; the chunks begin at column `first`.
template <int kChunks, typename T>
__device__ void add_weighted(Tile<Compute<T>>& weights, const TileRows<T>& x,
                             std::int64_t first, std::int64_t dim,
                             Tile<Compute<T>>& right,
                             Compute<T> (&sums)[kChunks][kRows]) {
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    if (first + c * kTile < dim) {
      __syncthreads();  // No warp reads the tile any more; weights are written
      load_tile(x, first + c * kTile, dim, right);
      __syncthreads();
#pragma unroll 8
      for (int j = 0; j < kTile; ++j) {
        const Compute<T> other = right[j * kLd + lane()];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          sums[c][r] += weights[(first_row() + r) * kLd + j] * other;
        }
      }
    }
  }
}

// A bit for each of a thread's kRows elements of a tile: whether dropout keeps
// it. `index(r)` is the global index of element r. Drawn in a loop that is not
// unrolled, since its code is long.
template <typename Index>
__device__ unsigned kept_rows(const DropoutMask& mask, Index index) {
  if (!mask.active) return ~0u;
  unsigned kept = 0;
#pragma unroll 1
  for (int r = 0; r < kRows; ++r) {
    kept |= static_cast<unsigned>(mask.keeps(index(r))) << r;
  }
  return kept;
}

// Which tile a block owns. Causal tiles of queries differ in work: the long
// ones start first.
struct Place {
  std::int64_t first;   // row
  std::int64_t column;  // of the chunk
  std::int64_t b, h;
};
__device__ inline Place place_of_block(std::int64_t tiles, std::int64_t chunks,
                                       int kChunks, std::int64_t heads,
                                       bool last_first) {
  std::int64_t i = blockIdx.x;
  Place place;
  const std::int64_t tile = i % tiles;
  place.first = (last_first ? tiles - 1 - tile : tile) * kTile;
  i /= tiles;
  place.column = i % chunks * kChunks * kTile;
  i /= chunks;
  place.h = i % heads;
  place.b = i / heads;
  return place;
}

template <typename T>
__device__ void store(T* to, Compute<T> value, bool accumulate) {
  if (accumulate) value += widen(*to);
  *to = narrow<T>(value);
}

// Calls body(chunks of 32 columns per block as a constant, blocks per row).
template <typename Body>
void with_chunks(std::int64_t head_dim, Body body) {
  if (head_dim <= 2 * kTile) {
    body(std::integral_constant<int, 2>(), std::int64_t{1});
  } else {
    body(std::integral_constant<int, 4>(), ceil_div(head_dim, 4 * kTile));
  }
}

}  // namespace shardbook::kernels::cuda
