#pragma once

// Ring self-attention (RSA): keys travel once to fill whole rows of scores, then
// values travel to weigh them.
//
//   scores [s/c, s] on rank 1 of 3:   step 2 | step 0 | step 1
//                                     K of 0 | K of 1 | K of 2 ...
//
// The softmax is the ordinary one, over the full row: exact, and simple. A rank
// keeps b heads (s/c) s scores, so memory still grows with s^2, divided by c.
//
// Li et al. 2021, "Sequence Parallelism: Long Sequence Training from System
// Perspective", section 3; Colossal-AI's RingQK and RingAV. Unlike those, the
// gradients are not divided by c, and scores are divided by sqrt(head dim).

#include "comm/process_group.h"
#include "core/ops.h"

namespace shardbook::sequence_parallel {

struct RsaOptions {
  /// heads, kv_heads, causal, scale and dropout.
  AttentionOptions attention;
  /// Sum dK and dV as the original does, with an all-reduce of all s rows of
  /// which each rank keeps its own. A reduce-scatter sends half as much.
  bool all_reduce = false;
  /// causal_rows, for attentions that share it; undefined: made at each call.
  Tensor mask;
};

/// [n, s] to add to the scores of queries first, first + 1, ...: 0 for a key
/// that the query sees, otherwise -1e30 or less, which softmax turns into 0.
Tensor causal_rows(std::int64_t first, std::int64_t n, std::int64_t s,
                   const TensorOptions& like);

/// Scores of this rank's queries with all keys, not scaled.
///
///   q        [b heads, s/c, d]   contiguous slices
///   k        [b kv_heads, s/c, d]; heads / kv_heads neighbours share one
///   returns  [b heads, s/c, s]
///
/// Communication, Z = b kv_heads s d: forward (c-1)/c Z; backward as much for dQ,
/// and a reduce-scatter of Z for dK.
Tensor ring_qk(const Tensor& q, const Tensor& k, ProcessGroup& cp,
               bool use_all_reduce = false);
/// Sums of all values, weighted. The same costs, with dV for dK.
///
///   weights  [b heads, s/c, s]
///   v        [b kv_heads, s/c, d]
///   returns  [b heads, s/c, d]
Tensor ring_av(const Tensor& weights, const Tensor& v, ProcessGroup& cp,
               bool use_all_reduce = false);

/// q [b, s/c, heads d], k and v [b, s/c, kv_heads d], contiguous slices of the
/// sequence -> like q.
Tensor ring_self_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                           const RsaOptions& options, ProcessGroup& cp);

}  // namespace shardbook::sequence_parallel
