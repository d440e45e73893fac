#pragma once

// Which rank of a group holds which tokens of a sequence of s, and which
// queries meet which keys when a block of keys visits a rank.
//
//   c = 2, s = 8      rank 0      rank 1
//   contiguous        0 1 2 3     4 5 6 7
//   zigzag            0 1 6 7     2 3 4 5     chunks r and 2c-1-r of 2c
//   striped           0 2 4 6     1 3 5 7     tokens r, r + c, ...
//
// Under a causal mask a late query sees more keys than an early one. Contiguous
// slices leave rank 0 with almost nothing to do; the other two share the work.

#include <cstdint>
#include <string>
#include <vector>

#include "core/attention_block.h"
#include "core/tensor.h"

namespace shardbook::sequence_parallel {

enum class Layout { kContiguous, kZigzag, kStriped };
/// "contiguous", "zigzag", "striped"; throws Error for other names.
Layout layout_of(const std::string& name);
const char* layout_name(Layout layout);

/// Throws Error, which names the sizes that work, unless s divides by c (zigzag:
/// by 2c).
void check_sequence(Layout layout, int c, std::int64_t s);

/// The tokens of one rank: consecutive, or at equal distances.
struct TokenRun {
  std::int64_t first = 0;
  std::int64_t count = 0;
  std::int64_t step = 1;
};
/// In the order in which the rank holds them; two runs for zigzag.
std::vector<TokenRun> token_runs(Layout layout, int rank, int c,
                                 std::int64_t s);

/// Positions of the rank's tokens in the whole sequence, in the rank's order:
/// position embeddings, targets and loss masks are cut by them.
std::vector<std::int64_t> positions(Layout layout, int rank, int c,
                                    std::int64_t s);

/// This rank's part of dim `dim` of a tensor, in the rank's order. Backward
/// puts the gradient into the same places; other ranks' parts get zeros.
Tensor cut_sequence(const Tensor& whole, std::int64_t dim, Layout layout,
                    int rank, int c);
/// The whole from the ranks' parts, by rank.
Tensor join_sequence(const Tensors& parts, std::int64_t dim, Layout layout);

/// The blocks that rank `rank` computes from its n queries and the n keys of
/// rank `source`. Empty where the mask hides all of them.
///
/// With `runs_apart`, no block holds tokens of two runs: dropout's mask needs
/// rows at equal distances in one device's [s, s].
std::vector<AttentionBlock> visible_blocks(Layout layout, int rank, int source,
                                           int c, std::int64_t n, bool causal,
                                           bool runs_apart = false);
/// The pairs of a query and a key that a causal mask leaves of these.
double visible_pairs(Layout layout, int rank, int source, int c,
                     std::int64_t n);

/// Where the block lies in one device's [b, heads, s, s].
ShardView shard_of(const AttentionBlock& block, Layout layout, int rank,
                   int source, int c, std::int64_t batch, std::int64_t heads,
                   std::int64_t s);

}  // namespace shardbook::sequence_parallel
