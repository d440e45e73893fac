#pragma once

// Ulysses: outside attention the tokens are cut, inside it the heads.
//
//           tokens                        tokens
//   rank 0  h0 h1 h2 h3                   h0
//           h0 h1 h2 h3   all-to-all      h0     rank 0: all tokens, head 0
//   rank 1  h0 h1 h2 h3  ----------->     h0
//           h0 h1 h2 h3                   h0     rank 1: all tokens, head 1, ...
//
// Each rank computes ordinary attention on a/c heads of the whole sequence, and
// a second all-to-all brings the outputs back. The exchange is a permutation, so
// every number is the one that a single device computes.
//
// Jacobs et al. 2023, "DeepSpeed Ulysses", section 3; DeepSpeed's
// DistributedAttention.

#include <string>

#include "comm/process_group.h"
#include "core/ops.h"

namespace shardbook::sequence_parallel {

/// [b, s/c, heads d] -> [b, s, (heads/c) d]: sends block j of the heads to rank
/// j; the tokens lie in the order of the ranks that they came from. Backward is
/// gather_heads. An all-to-all of b (s/c) heads d elements each way.
Tensor scatter_heads(const Tensor& x, ProcessGroup& cp,
                     const std::string& label = "");
/// The inverse: [b, s, (heads/c) d] -> [b, s/c, heads d].
Tensor gather_heads(const Tensor& x, ProcessGroup& cp,
                    const std::string& label = "");

/// Attention over the whole sequence, each rank a/c heads of it.
///
///   q        [b, s/c, heads d]   contiguous slices
///   k, v     [b, s/c, kv_heads d]
///   returns  [b, s/c, heads d]
///
/// Communication: four all-to-alls of b s h / c elements forward (Q, K, V, O)
/// and four backward (dO, dV, dK, dQ). Where c does not divide kv_heads, each
/// key head is sent lcm(kv_heads, c) / kv_heads times, and the gradients of the
/// copies are summed. Throws Error unless c divides heads.
Tensor ulysses_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                         const AttentionOptions& options, ProcessGroup& cp);

}  // namespace shardbook::sequence_parallel
