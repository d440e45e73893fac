#pragma once

// Attention in blocks: some queries to some keys at a time. The keys of a long
// sequence may arrive piece by piece, as they do in ring attention. Each piece
// leaves its output and the logarithm of its sum of weights:
//
//   const AttentionDraws draws = next_attention_draws();
//   AttentionSums sums = attention_block(q, k0, v0, block0, options, draws);
//   merge_attention(sums, 0, attention_block(q, k1, v1, block1, options, draws));
//   // sums.out is the attention of q to [k0; k1]
//
// Nothing here is recorded for backward. Observers see each call as one
// operation. A block that the mask hides entirely should not be computed: its
// logsumexp is -inf, and merging it changes nothing.

#include <cstdint>

#include "core/ops.h"

namespace shardbook {

/// Rows begin..end-1 of the sequence.
struct RowRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t size() const { return end - begin; }
};

/// Which queries meet which keys. With `causal`, the i-th of these queries sees
/// the j-th of these keys when i + shift >= j.
struct AttentionBlock {
  RowRange queries;
  RowRange keys;
  bool causal = false;
  std::int64_t shift = 0;
};

/// Number of query-key pairs of the block that the mask keeps, per head.
double visible_pairs(const AttentionBlock& block);

/// The random numbers of one attention's dropout, which all its blocks share.
struct AttentionDraws {
  std::uint64_t seed = 0;
  std::uint64_t stream = 0;
};
/// Draws of the step's next random operation.
AttentionDraws next_attention_draws();

/// Outputs and the logarithms of the sums of exp(scores).
struct AttentionSums {
  Tensor out;        ///< [b, rows, heads d]
  Tensor logsumexp;  ///< [b, heads, rows], f64 for f64, otherwise f32
};

/// q [b, sq, heads d], k and v [b, sk, kv_heads d], of which `block` names the
/// rows; `out` has q's dtype. `options.causal` is not read; `options.shard` says
/// where the block lies in one device's [b, heads, s, s].
AttentionSums attention_block(const Tensor& q, const Tensor& k, const Tensor& v,
                              const AttentionBlock& block,
                              const AttentionOptions& options,
                              const AttentionDraws& draws);

/// Adds a block to a result whose row `first` is the block's first query:
///
///   w = sigmoid(lse_b - lse),  out -= w (out - out_b),
///   lse -= log sigmoid(lse - lse_b)
///
/// sums.out has logsumexp's dtype; begin with zeros and -inf, or with a block of
/// all queries. Rows whose lse_b is -inf stay as they are. 3 flops per element.
void merge_attention(const AttentionSums& sums, std::int64_t first,
                     const AttentionSums& block);

/// Adds the block's part of the gradients to dq, dk and dv, which are like q, k
/// and v but of logsumexp's dtype. `out`, `dout` and `logsumexp` belong to the
/// complete attention of all of q; the probabilities are computed again.
void attention_block_backward(const Tensor& q, const Tensor& k, const Tensor& v,
                              const AttentionSums& complete, const Tensor& dout,
                              const AttentionBlock& block,
                              const AttentionOptions& options,
                              const AttentionDraws& draws, const Tensor& dq,
                              const Tensor& dk, const Tensor& dv);

}  // namespace shardbook
