#pragma once

// One head at a time, all in cache:
//
//              keys: blocks of kKeyBlock
//             +-------+-------+---
//   queries:  | tile  |  ...           a tile of scores, then of
//   kQuery-   |       |                probabilities, lives in L1
//   Block     +-------+-------+---
//
// Keys and values are repacked once per head, so that every product runs on
// the panels of gemm.h. Queries carry the scale.
//
// Under a causal mask each register tile (kTileRows queries) has its own end:
//
//   keys  0 ........ 16 ...... 32            x computed, . left out
//         x x x x x x x x . . . . . .
//         x x x x x x x x x x x x . .
//
// Read by core/kernels/cpu/attention*.cpp only.

#include <algorithm>
#include <cstdint>
#include <limits>

#include "core/kernels/attention.h"
#include "core/kernels/cpu/gemm.h"
#include "core/kernels/cpu/vector_math.h"

namespace shardbook::kernels::cpu {

constexpr std::int64_t kQueryBlock = 2 * kTileRows;
constexpr std::int64_t kKeyBlock = 256;
// Rows of a tile of scores start in different sets of L1.
constexpr std::int64_t kScoreLd = kKeyBlock + 16;

// The part of a block of scores that the mask keeps: queries [first, first +
// rows), keys [from, from + count). The others are not computed.
struct Block {
  const AttentionArgs& args;
  std::int64_t first, rows, from, count;

  /// Number of keys that query `row` of the block sees. Always inlined: calls
  /// for every row of a tile would cost some percent of the forward.
  [[gnu::always_inline]] std::int64_t seen_by(std::int64_t row) const {
    if (!args.causal) return count;
    const std::int64_t end = args.q_position + first + row + 1 - from;
    return std::clamp<std::int64_t>(end, 0, count);
  }
  /// Number of keys that the tile with first row `row` sees.
  std::int64_t seen_by_tile(std::int64_t row) const {
    return seen_by(std::min<std::int64_t>(row + kTileRows, rows) - 1);
  }
  /// The first query that sees `key` of the block.
  std::int64_t first_to_see(std::int64_t key) const {
    if (!args.causal) return 0;
    return std::clamp<std::int64_t>(from + key - args.q_position - first, 0,
                                    rows);
  }
  /// End of the weights that tiles read for a query that sees `seen` keys: a
  /// tile's last query sees at most this many. Weights past `seen` are zero.
  std::int64_t end_of_row(std::int64_t seen) const {
    return std::min<std::int64_t>(count, seen + kTileRows - 1);
  }
};

// How many of the first `keys` keys the query `row` of a head sees.
inline std::int64_t visible(const AttentionArgs& args, std::int64_t row,
                            std::int64_t keys) {
  return Block{args, row, 1, 0, keys}.seen_by(0);
}

// Dot products of rows, `ld` apart, with packed columns.
template <typename S>
void multiply_scores(const Block& block, std::int64_t dim, const S* left,
                     std::int64_t ld, const S* panels, S* scores) {
  constexpr std::int64_t kCols = kTileCols<S>;
  for (std::int64_t j = 0; j < block.count; j += kCols) {
    for (std::int64_t i = 0; i < block.rows; i += kTileRows) {
      const std::int64_t seen = block.seen_by_tile(i) - j;
      if (seen <= 0) continue;
      multiply_panel<0>(std::min<std::int64_t>(kTileRows, block.rows - i),
                        seen > kLanes<S> ? kCols : kLanes<S>, dim,
                        left + i * ld, ld, panels + (block.from + j) * dim,
                        kCols,
                        /*resume=*/false, scores + i * kScoreLd + j, kScoreLd);
    }
  }
}

// out[rows, dim] (+)= weights[rows, count] times the rows of the block's keys
// in a matrix packed along its dims; the first block of keys overwrites `out`.
template <typename S>
void multiply_weights(const Block& block, const S* weights, const S* panels,
                      std::int64_t panel_rows, std::int64_t dim, S* out,
                      std::int64_t ld) {
  constexpr std::int64_t kCols = kTileCols<S>;
  const bool add = block.from != 0;
  for (std::int64_t c = 0; c < dim; c += kCols) {
    for (std::int64_t i = 0; i < block.rows; i += kTileRows) {
      S* const to = out + i * ld + c;
      multiply_panel<kScoreLd>(
          std::min<std::int64_t>(kTileRows, block.rows - i), kCols,
          block.seen_by_tile(i), weights + i * kScoreLd, 1,
          panels + c * panel_rows + block.from * kCols, kCols, add, to, ld);
    }
  }
}

// out[count, dim] += weights[rows, count]^T times the rows of the queries. Rows
// of both are `ld` apart.
template <typename S>
void multiply_transposed(const Block& block, const S* weights, const S* queries,
                         std::int64_t dim, S* out, std::int64_t ld) {
  constexpr std::int64_t kCols = kTileCols<S>;
  for (std::int64_t c = 0; c < dim; c += kCols) {
    for (std::int64_t j = 0; j < block.count; j += kTileRows) {
      const std::int64_t row = block.first_to_see(j);
      if (row == block.rows) continue;
      S* const to = out + j * ld + c;
      multiply_panel<1>(std::min<std::int64_t>(kTileRows, block.count - j),
                        kCols, block.rows - row, weights + row * kScoreLd + j,
                        kScoreLd, queries + row * ld + c, ld,
                        /*resume=*/true, to, ld);
    }
  }
}

// 0, 1, 2, ... for masks of the last vector of a row.
template <typename S>
Vec<S> lane_numbers() {
  alignas(64) S lanes[kLanes<S>];
  for (std::int64_t i = 0; i < kLanes<S>; ++i) lanes[i] = static_cast<S>(i);
  return Vec<S>::load_aligned(lanes);
}

// Applies fn(i, vector) to the first n elements of a padded row: lanes past n
// hold `rest`. Always inlined, for the same reason as seen_by.
template <typename S, typename Fn>
[[gnu::always_inline]] inline void for_padded(std::int64_t n, const S* x,
                                              S rest, const Fn& fn) {
  std::int64_t i = 0;
  for (; i + kLanes<S> <= n; i += kLanes<S>) fn(i, load(x + i));
  if (i < n) {
    const auto inside = lane_numbers<S>() < Vec<S>(static_cast<S>(n - i));
    fn(i, xsimd::select(inside, load(x + i), Vec<S>(rest)));
  }
}

template <typename S>
[[gnu::always_inline]] inline S max_padded(const S* x, std::int64_t n) {
  constexpr S kLowest = -std::numeric_limits<S>::infinity();
  Vec<S> best(kLowest);
  for_padded(n, x, kLowest, [&](std::int64_t, const Vec<S>& v) {
    best = xsimd::max(best, v);
  });
  return max_lanes(best);
}

// x[i] = exp(x[i] - shift) for i < n, zeros up to `end`; returns the sum.
template <typename S>
S exp_padded(S* x, std::int64_t n, std::int64_t end, S shift) {
  Vec<S> sum(S(0));
  const Vec<S> by(shift);
  for_padded(n, x, -std::numeric_limits<S>::infinity(),
             [&](std::int64_t i, const Vec<S>& v) {
               const Vec<S> e = exp_vec_small(v - by);
               store(x + i, e);
               sum = sum + e;
             });
  for (std::int64_t i = round_up(n, kLanes<S>); i < end; i += kLanes<S>) {
    store(x + i, Vec<S>(S(0)));
  }
  return sum_lanes(sum);
}

}  // namespace shardbook::kernels::cpu
