#pragma once

// Fused attention: softmax(scale * Q K^T + mask) V without the [S, S] matrix.

#include <cstdint>

#include "core/dtype.h"
#include "core/kernels/kernel.h"
#include "core/kernels/random.h"

namespace shardbook::kernels {

/// Where element (b, h, s, d) lies: b * batch + h * head + s * row + d.
struct HeadStrides {
  std::int64_t batch = 0;
  std::int64_t head = 0;
  std::int64_t row = 0;
};

/// The shape of an attention, and how its operands lie in memory.
///
/// For q, k and v packed as qkv [B, S, 3H] with H = heads * head_dim:
/// strides {S * 3H, head_dim, 3H}, pointers qkv, qkv + H, qkv + 2H.
///
/// `causal` lets query i see key j when q_position + i >= j, where q_position
/// counts from the first key, and may be negative: queries and keys may be
/// pieces of a longer sequence (ring attention). A query that sees no key gets
/// output 0, logsumexp -inf.
///
/// `kv_heads` < heads shares each key and value head among consecutive query
/// heads (grouped queries). It divides heads.
///
/// Dropout acts on the probabilities. Element (b, h, i, j) of the mask is drawn
/// at b, h, i, j of the global tensor [B', heads', S', S'] that `dropout_view`
/// describes (its shape must be [batch, heads, q_rows, k_rows]).
struct AttentionArgs {
  std::int64_t batch = 0;
  std::int64_t heads = 0;
  std::int64_t kv_heads = 0;
  std::int64_t q_rows = 0;
  std::int64_t k_rows = 0;
  std::int64_t head_dim = 0;
  /// Columns of a head of v and out; 0: head_dim. Others need the CPU.
  std::int64_t value_dim = 0;
  bool causal = true;
  std::int64_t q_position = 0;
  double scale = 1.0;
  HeadStrides q;
  HeadStrides k;
  HeadStrides v;
  HeadStrides out;
  double dropout = 0.0;
  RandomKey dropout_key;
  GlobalView dropout_view;

  std::int64_t value_width() const {
    return value_dim > 0 ? value_dim : head_dim;
  }
};

/// out = softmax(scale * Q K^T) V per batch row and head.
///
///   logsumexp  [batch, heads, q_rows] contiguous, f64 for f64, otherwise f32:
///              all that the backward keeps
///
/// Blocks that the causal mask hides entirely are skipped. Scratch: a tile of
/// scores per thread. FlashAttention-2 (Dao 2023), algorithm 1.
/// On CUDA, bf16 and f16 run on tensor cores from sm_80 on, when head_dim is 32,
/// 64, 96 or 128 and every row starts at a multiple of 16 bytes; weights are
/// then rounded to the dtype before the product with V. No atomics: the same
/// call gives the same bits each time.
SHARDBOOK_KERNEL(attention,
                 void(KernelContext& context, DType dtype,
                      const AttentionArgs& args, const void* q, const void* k,
                      const void* v, void* out, void* logsumexp));

/// How the gradients lie in memory.
struct AttentionGradStrides {
  HeadStrides dq;
  HeadStrides dk;
  HeadStrides dv;
  HeadStrides dout;
};

/// Gradients of `attention`; recomputes the probabilities from logsumexp.
///
/// `accumulate` adds to dq, dk and dv. When the keys are a piece of a longer
/// sequence, `out`, `dout` and `logsumexp` belong to the complete attention.
/// Order of additions: query rows for dk and dv, keys for dq, both increasing.
SHARDBOOK_KERNEL(attention_backward,
                 void(KernelContext& context, DType dtype,
                      const AttentionArgs& args,
                      const AttentionGradStrides& strides, const void* q,
                      const void* k, const void* v, const void* out,
                      const void* dout, const void* logsumexp, void* dq,
                      void* dk, void* dv, bool accumulate));

/// The shape of a merge: `out` [batch, heads, rows, head_dim] lies in a larger
/// array, and so does logsumexp [batch, heads, rows], whose heads are
/// `logsumexp_head` elements apart.
struct AttentionMergeArgs {
  std::int64_t batch = 0;
  std::int64_t heads = 0;
  std::int64_t rows = 0;
  std::int64_t head_dim = 0;
  HeadStrides out;
  HeadStrides block_out;
  std::int64_t logsumexp_head = 0;
};

/// Merges the attention of the same queries to other keys into a result, in
/// place; afterwards it is the attention to both:
///
///   w = sigmoid(block_logsumexp - logsumexp)
///   out = out - w (out - block_out)
///   logsumexp = logsumexp - log sigmoid(logsumexp - block_logsumexp)
///
///   block_out        `dtype`, as `attention` writes it
///   block_logsumexp  [batch, heads, rows] contiguous, as `attention` writes it
///   out, logsumexp   f64 for f64, otherwise f32: sums are rounded once, at the
///                    end
///
/// A row that the block leaves at -inf has seen no key there, and stays as it
/// is: the formula would compute inf - inf. A result at -inf is replaced.
SHARDBOOK_KERNEL(attention_merge,
                 void(KernelContext& context, DType dtype,
                      const AttentionMergeArgs& args, const void* block_out,
                      const void* block_logsumexp, void* out, void* logsumexp));

}  // namespace shardbook::kernels
