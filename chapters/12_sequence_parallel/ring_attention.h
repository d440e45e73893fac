#pragma once

// Ring attention: every rank keeps its queries, and keys and values travel.
//
// The softmax over the whole row is computed online, block by block: each block
// gives an output and the logarithm of its sum of weights, and two such pairs
// merge into one (core/attention_block.h). No rank ever holds a row of scores.
//
// Liu, Zaharia, Abbeel 2023, "Ring Attention with Blockwise Transformers for
// Near-Infinite Context"; zhuzilin/ring-flash-attention.

#include "chapters/12_sequence_parallel/sequence_layout.h"
#include "comm/process_group.h"
#include "core/ops.h"

namespace shardbook::sequence_parallel {

struct RingOptions {
  /// heads, kv_heads, causal, scale and dropout. `shard` is not read: the
  /// layout defines where the blocks lie.
  AttentionOptions attention;
  Layout layout = Layout::kContiguous;
};

/// Attention of this rank's queries to the keys of all ranks.
///
///   q        [b, s/c, heads d]      this rank's tokens, as `layout` gives them
///   k, v     [b, s/c, kv_heads d]
///   returns  [b, s/c, heads d]
///
/// Communication, Z = b (s/c) kv_heads d: forward 2 (c-1) sends of Z; backward
/// as many, and 2 c sends of Z in f32 (f64 for f64): dK and dV travel with their
/// block and need one hop more, to get home. Nothing where c = 1, which is
/// core's attention. Inputs without requires_grad cause no hops for them.
Tensor ring_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                      const RingOptions& options, ProcessGroup& cp);

}  // namespace shardbook::sequence_parallel
