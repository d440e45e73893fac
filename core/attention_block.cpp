#include "core/attention_block.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "core/copy_runs.h"
#include "core/internal/op_scope.h"
#include "core/internal/random_position.h"
#include "core/kernels/attention.h"

namespace shardbook {

using internal::OpScope;

namespace {

std::int64_t kv_heads_of(const AttentionOptions& options) {
  return options.kv_heads == 0 ? options.heads : options.kv_heads;
}

/// Heads side by side in rows of `width` elements; `rows` rows per batch row.
kernels::HeadStrides side_by_side(std::int64_t rows, std::int64_t width,
                                  std::int64_t head_dim) {
  return {rows * width, head_dim, width};
}

/// The address of row `row` of each batch row.
void* at_row(const Tensor& x, std::int64_t row) {
  return internal::address_of(x, row * x.size(2));
}

void check_rows(const char* what, const RowRange& rows, const Tensor& x) {
  SB_CHECK(0 <= rows.begin && rows.begin <= rows.end && rows.end <= x.size(1),
           "attention_block: ", what, " ", rows.begin, " to ", rows.end,
           " of shape ", shape_text(x.shape()));
}

kernels::AttentionArgs block_args(const Tensor& q, const Tensor& k,
                                  const Tensor& v, const AttentionBlock& block,
                                  const AttentionOptions& options,
                                  const AttentionDraws& draws) {
  internal::check_same_kind("attention_block", q, k);
  internal::check_same_kind("attention_block", q, v);
  SB_CHECK(q.ndim() == 3 && k.ndim() == 3 && k.shape() == v.shape() &&
               q.size(0) == k.size(0) && options.heads > 0 &&
               q.size(2) % options.heads == 0 &&
               q.size(2) / options.heads * kv_heads_of(options) == k.size(2),
           "attention_block: shapes q ", shape_text(q.shape()), ", k ",
           shape_text(k.shape()), ", v ", shape_text(v.shape()), " with ",
           options.heads, " heads of queries and ", kv_heads_of(options),
           " of keys");
  check_rows("queries", block.queries, q);
  check_rows("keys", block.keys, k);
  kernels::AttentionArgs args;
  args.batch = q.size(0);
  args.heads = options.heads;
  args.kv_heads = kv_heads_of(options);
  args.q_rows = block.queries.size();
  args.k_rows = block.keys.size();
  args.head_dim = q.size(2) / options.heads;
  args.causal = block.causal;
  args.q_position = block.shift;
  args.scale = options.scale != 0
                   ? options.scale
                   : 1.0 / std::sqrt(static_cast<double>(args.head_dim));
  args.q = side_by_side(q.size(1), q.size(2), args.head_dim);
  args.k = args.v = side_by_side(k.size(1), k.size(2), args.head_dim);
  args.out = side_by_side(args.q_rows, q.size(2), args.head_dim);
  args.dropout = options.dropout;
  args.dropout_key = {draws.seed, draws.stream};
  if (options.dropout > 0) {
    args.dropout_view = internal::global_view(
        {args.batch, args.heads, args.q_rows, args.k_rows}, options.shard);
  }
  return args;
}

/// One product of the block's queries with the keys that they see.
double product_flops(const kernels::AttentionArgs& args,
                     const AttentionBlock& block) {
  return 2 * visible_pairs(block) *
         static_cast<double>(args.batch * args.heads * args.head_dim);
}

/// A device computes all pairs of [queries, keys], or half of them.
ProductShape product_of(const kernels::AttentionArgs& args) {
  return {args.q_rows, args.k_rows, args.head_dim, args.batch * args.heads};
}

/// Bytes of the block's rows of q (or k) in `copies` tensors.
double row_bytes(const RowRange& rows, const Tensor& like, int copies) {
  return copies *
         static_cast<double>(rows.size() * like.size(0) * like.size(2)) *
         static_cast<double>(dtype_bytes(like.dtype()));
}

/// to[:, rows] += from, whose dtype may be another.
void add_rows(const Tensor& to, const RowRange& rows, const Tensor& from) {
  const std::int64_t width = to.size(2);
  const Tensor value = to_dtype(from, to.dtype());
  const std::int64_t n = rows.size() * width;
  if (n == 0) return;  // add_runs reads a count of 0 as "all"
  add_runs(
      {{to.flat_view(rows.begin * width, {to.numel() - rows.begin * width}),
        value, to.size(0), n, to.size(1) * width, n}});
}

}  // namespace

double visible_pairs(const AttentionBlock& block) {
  const std::int64_t q = block.queries.size(), k = block.keys.size();
  if (!block.causal) return static_cast<double>(q) * static_cast<double>(k);
  // Query i sees min(k, i + shift + 1) keys, from the first that sees any on
  const std::int64_t first = std::clamp<std::int64_t>(-block.shift, 0, q);
  const std::int64_t full =
      std::clamp<std::int64_t>(k - 1 - block.shift, first, q);
  const auto rising = static_cast<double>(full - first);
  const auto start = static_cast<double>(first + block.shift + 1);
  return rising * start + rising * (rising - 1) / 2 +
         static_cast<double>(q - full) * static_cast<double>(k);
}

AttentionDraws next_attention_draws() {
  const kernels::RandomKey key = internal::next_random_key("attention_block");
  return {key.seed, key.stream};
}

AttentionSums attention_block(const Tensor& q, const Tensor& k, const Tensor& v,
                              const AttentionBlock& block,
                              const AttentionOptions& options,
                              const AttentionDraws& draws) {
  const kernels::AttentionArgs args =
      block_args(q, k, v, block, options, draws);
  AttentionSums sums;
  sums.out = Tensor::empty({q.size(0), args.q_rows, q.size(2)}, q.options());
  sums.logsumexp = Tensor::empty({q.size(0), args.heads, args.q_rows},
                                 {internal::stat_dtype(q.dtype()), q.device()});
  OpScope("attention", 2 * product_flops(args, block),
          row_bytes(block.queries, q, 2) + row_bytes(block.keys, k, 2), q,
          product_of(args))
      .run(kernels::attention, q.dtype(), args, at_row(q, block.queries.begin),
           at_row(k, block.keys.begin), at_row(v, block.keys.begin),
           sums.out.raw(), sums.logsumexp.raw());
  return sums;
}

void merge_attention(const AttentionSums& sums, std::int64_t first,
                     const AttentionSums& block) {
  const Tensor &out = sums.out, &added = block.out;
  const std::int64_t heads = sums.logsumexp.size(1), rows = added.size(1);
  SB_CHECK(out.size(0) == added.size(0) && out.size(2) == added.size(2) &&
               0 <= first && first + rows <= out.size(1) &&
               out.dtype() == sums.logsumexp.dtype() &&
               out.dtype() == internal::stat_dtype(added.dtype()),
           "merge_attention: a block of shape ", shape_text(added.shape()),
           " and dtype ", dtype_name(added.dtype()), " at row ", first, " of ",
           shape_text(out.shape()), " of dtype ", dtype_name(out.dtype()));
  kernels::AttentionMergeArgs args;
  args.batch = out.size(0);
  args.heads = heads;
  args.rows = rows;
  args.head_dim = out.size(2) / heads;
  args.out = side_by_side(out.size(1), out.size(2), args.head_dim);
  args.block_out = side_by_side(rows, out.size(2), args.head_dim);
  args.logsumexp_head = out.size(1);
  OpScope scope("merge_attention", 3 * internal::count(added),
                static_cast<double>(added.bytes()) +
                    2 * internal::count(added) *
                        static_cast<double>(dtype_bytes(out.dtype())),
                out);
  scope.run(kernels::attention_merge, added.dtype(), args, added.raw(),
            block.logsumexp.raw(), at_row(out, first),
            internal::address_of(sums.logsumexp, first));
}

void attention_block_backward(const Tensor& q, const Tensor& k, const Tensor& v,
                              const AttentionSums& complete, const Tensor& dout,
                              const AttentionBlock& block,
                              const AttentionOptions& options,
                              const AttentionDraws& draws, const Tensor& dq,
                              const Tensor& dk, const Tensor& dv) {
  kernels::AttentionArgs args = block_args(q, k, v, block, options, draws);
  args.out = args.q;
  const RowRange &queries = block.queries, &keys = block.keys;
  // The kernel reads the logsumexp of its queries end to end
  const bool all = queries.size() == q.size(1);
  const Tensor lse =
      all ? complete.logsumexp
          : slice(complete.logsumexp.detach(), 2, queries.begin, queries.end);
  // Sums are kept in f32: 16-bit gradients of a block are computed apart
  const bool in_place = dq.dtype() == q.dtype();
  kernels::AttentionGradStrides strides{args.q, args.k, args.v, args.q};
  Tensor to_q = dq, to_k = dk, to_v = dv;
  if (!in_place) {
    to_q = Tensor::empty({q.size(0), queries.size(), q.size(2)}, q.options());
    to_k = Tensor::empty({k.size(0), keys.size(), k.size(2)}, k.options());
    to_v = to_k.empty_like();
    strides.dq = side_by_side(queries.size(), q.size(2), args.head_dim);
    strides.dk = strides.dv =
        side_by_side(keys.size(), k.size(2), args.head_dim);
  }
  const std::int64_t to_query = in_place ? queries.begin : 0;
  const std::int64_t to_key = in_place ? keys.begin : 0;
  OpScope("attention", 5 * product_flops(args, block),
          row_bytes(queries, q, 4) + row_bytes(keys, k, 4), q, product_of(args))
      .run(kernels::attention_backward, q.dtype(), args, strides,
           at_row(q, queries.begin), at_row(k, keys.begin),
           at_row(v, keys.begin), at_row(complete.out, queries.begin),
           at_row(dout, queries.begin), lse.raw(), at_row(to_q, to_query),
           at_row(to_k, to_key), at_row(to_v, to_key), in_place);
  if (in_place) return;
  add_rows(dq, queries, to_q);
  add_rows(dk, keys, to_k);
  add_rows(dv, keys, to_v);
}

}  // namespace shardbook
