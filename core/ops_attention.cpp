// Attention, whole and in blocks.

#include <cmath>

#include "core/attention_block.h"
#include "core/check.h"
#include "core/copy_runs.h"
#include "core/internal/op_scope.h"
#include "core/internal/random_position.h"
#include "core/kernels/attention.h"

namespace shardbook {

using internal::bytes_of;
using internal::OpScope;

namespace {

struct AttentionShape {
  std::int64_t batch, q_rows, k_rows, width;
};

/// Heads of `head_dim` columns inside rows that are `row` elements apart; `rows`
/// rows per batch row.
kernels::HeadStrides heads_in(std::int64_t rows, std::int64_t row,
                              std::int64_t head_dim) {
  return {rows * row, head_dim, row};
}

std::int64_t kv_heads_of(const AttentionOptions& options) {
  return options.kv_heads == 0 ? options.heads : options.kv_heads;
}

/// Of q, k and v apart.
void check_values(const AttentionOptions& options) {
  SB_CHECK(options.value_dim == 0, "attention: values of ", options.value_dim,
           " columns; a width of their own needs [q | k | v] in one tensor");
}

kernels::AttentionArgs args_of(const AttentionShape& shape,
                               const AttentionOptions& options) {
  kernels::AttentionArgs args;
  args.batch = shape.batch;
  args.heads = options.heads;
  args.kv_heads = kv_heads_of(options);
  args.q_rows = shape.q_rows;
  args.k_rows = shape.k_rows;
  args.head_dim = shape.width / options.heads;
  args.value_dim = options.value_dim > 0 ? options.value_dim : args.head_dim;
  args.causal = options.causal;
  args.scale = options.scale != 0
                   ? options.scale
                   : 1.0 / std::sqrt(static_cast<double>(args.head_dim));
  args.out =
      heads_in(shape.q_rows, options.heads * args.value_dim, args.value_dim);
  args.dropout = options.dropout;
  if (options.dropout > 0) {
    args.dropout_view = internal::global_view(
        {args.batch, args.heads, args.q_rows, args.k_rows}, options.shard);
  }
  return args;
}

/// So many products over the width of queries, and over that of values, where
/// each head sees `pairs` pairs.
double product_flops(const kernels::AttentionArgs& args, double pairs,
                     int of_queries, int of_values) {
  return 2 * pairs *
         static_cast<double>(
             args.batch * args.heads *
             (of_queries * args.head_dim + of_values * args.value_dim));
}
/// Scores, and sums of values.
double forward_flops(const kernels::AttentionArgs& args, double pairs) {
  return product_flops(args, pairs, 1, 1);
}
/// Scores and gradients of queries and keys; of values and of their weights.
double backward_flops(const kernels::AttentionArgs& args, double pairs) {
  return product_flops(args, pairs, 3, 2);
}

/// A device computes all pairs of [queries, keys], or half of them.
ProductShape product_of(const kernels::AttentionArgs& args) {
  return {args.q_rows, args.k_rows, args.head_dim, args.batch * args.heads};
}

// --- Whole -------------------------------------------------------------------

kernels::AttentionArgs whole_args(const AttentionShape& shape,
                                  const AttentionOptions& options) {
  SB_CHECK(options.heads > 0 && shape.width % options.heads == 0,
           "attention: ", options.heads, " heads do not divide a width of ",
           shape.width);
  kernels::AttentionArgs args = args_of(shape, options);
  if (options.dropout > 0) {
    args.dropout_key = internal::next_random_key("attention");
  }
  return args;
}

/// Pairs of queries with the keys they may see.
double pairs_of(const kernels::AttentionArgs& args) {
  const auto q = static_cast<double>(args.q_rows);
  const auto k = static_cast<double>(args.k_rows);
  return args.causal ? q * (k + 1) / 2 : q * k;
}

/// Attention of {qkv}, or of {q, k, v}.
Tensor attend(const Tensors& inputs, const kernels::AttentionArgs& args) {
  const Tensor& q = inputs[0];
  SB_CHECK(args.value_dim == args.head_dim || !q.device().is_cuda(),
           "attention: values of ", args.value_dim, " columns and queries of ",
           args.head_dim, " on a GPU; its kernels need equal ones");
  const Tensor out = Tensor::empty(
      {args.batch, args.q_rows, args.heads * args.value_dim}, q.options());
  const Tensor lse =
      Tensor::empty({args.batch, args.heads, args.q_rows},
                    {internal::stat_dtype(q.dtype()), q.device()});
  // Packed: behind the heads of q are those of k, then those of v
  const auto part = [args](const Tensors& x, std::int64_t i) {
    const std::int64_t before =
        i == 0 ? 0 : args.heads + (i - 1) * args.kv_heads;
    return x.size() == 3 ? x[static_cast<std::size_t>(i)].raw()
                         : internal::address_of(x[0], before * args.head_dim);
  };
  double bytes = bytes_of({&out});
  for (const Tensor& input : inputs) bytes += bytes_of({&input});
  const ProductShape product = product_of(args);
  OpScope("attention", forward_flops(args, pairs_of(args)), bytes, q, product)
      .run(kernels::attention, q.dtype(), args, part(inputs, 0),
           part(inputs, 1), part(inputs, 2), out.raw(), lse.raw());
  autograd::record("attention", inputs, {out},
                   [=, out = out.detach()](const Tensors& grads) {
                     const Tensor& dout = grads[0];
                     Tensors result;
                     for (const Tensor& input : inputs)
                       result.push_back(input.empty_like());
                     OpScope("attention", backward_flops(args, pairs_of(args)),
                             2 * bytes, dout, product)
                         .run(kernels::attention_backward, dout.dtype(), args,
                              kernels::AttentionGradStrides{args.q, args.k,
                                                            args.v, args.out},
                              part(inputs, 0), part(inputs, 1), part(inputs, 2),
                              out.raw(), dout.raw(), lse.raw(), part(result, 0),
                              part(result, 1), part(result, 2), false);
                     return result;
                   });
  return out;
}

}  // namespace

Tensor attention(const Tensor& qkv, const AttentionOptions& options) {
  const std::int64_t heads = options.heads, kv_heads = kv_heads_of(options);
  const bool grouped = kv_heads != heads || options.value_dim > 0;
  SB_CHECK(qkv.ndim() == 3 && (grouped || qkv.size(2) % 3 == 0),
           "attention: qkv has shape ", shape_text(qkv.shape()),
           "; give [batch, sequence, 3 * width]");
  const std::int64_t b = qkv.size(0), s = qkv.size(1), row = qkv.size(2);
  const std::int64_t values = options.value_dim * kv_heads;
  const std::int64_t shared = heads + (values > 0 ? 1 : 2) * kv_heads;
  SB_CHECK(!grouped || (kv_heads > 0 && heads > 0 && heads % kv_heads == 0 &&
                        row > values && (row - values) % shared == 0),
           "attention: [q | k | v] of ", heads, " heads of queries and ",
           kv_heads, " of keys in rows of ", row,
           " columns; give (heads + 2 kv_heads) * head width of them, with "
           "kv_heads that divide heads");
  const std::int64_t width =
      grouped ? (row - values) / shared * heads : row / 3;
  kernels::AttentionArgs args = whole_args({b, s, s, width}, options);
  args.q = args.k = heads_in(s, row, args.head_dim);
  args.v = heads_in(s, row, args.value_dim);
  return attend({qkv}, args);
}

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v,
                 const AttentionOptions& options) {
  check_values(options);
  internal::check_same_kind("attention", q, k);
  internal::check_same_kind("attention", q, v);
  SB_CHECK(q.ndim() == 3 && k.ndim() == 3 && k.shape() == v.shape() &&
               q.size(0) == k.size(0),
           "attention: shapes q ", shape_text(q.shape()), ", k ",
           shape_text(k.shape()), ", v ", shape_text(v.shape()),
           "; give [batch, rows, width] with one batch");
  kernels::AttentionArgs args =
      whole_args({q.size(0), q.size(1), k.size(1), q.size(2)}, options);
  const std::int64_t kv_heads = kv_heads_of(options);
  SB_CHECK(kv_heads > 0 && options.heads % kv_heads == 0 &&
               k.size(2) == kv_heads * args.head_dim,
           "attention: keys of width ", k.size(2), " for ", kv_heads, " of ",
           options.heads, " heads of ", args.head_dim, " columns");
  args.q = heads_in(q.size(1), q.size(2), args.head_dim);
  args.k = args.v = heads_in(k.size(1), k.size(2), args.head_dim);
  return attend({q, k, v}, args);
}

// --- In blocks ---------------------------------------------------------------

namespace {

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
  check_values(options);
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
  kernels::AttentionArgs args = args_of(
      {q.size(0), block.queries.size(), block.keys.size(), q.size(2)}, options);
  args.causal = block.causal;
  args.q_position = block.shift;
  args.q = heads_in(q.size(1), q.size(2), args.head_dim);
  args.k = args.v = heads_in(k.size(1), k.size(2), args.head_dim);
  args.dropout_key = {draws.seed, draws.stream};
  return args;
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
  OpScope("attention", forward_flops(args, visible_pairs(block)),
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
  args.out = heads_in(out.size(1), out.size(2), args.head_dim);
  args.block_out = heads_in(rows, out.size(2), args.head_dim);
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
    strides.dq = heads_in(queries.size(), q.size(2), args.head_dim);
    strides.dk = strides.dv = heads_in(keys.size(), k.size(2), args.head_dim);
  }
  const std::int64_t to_query = in_place ? queries.begin : 0;
  const std::int64_t to_key = in_place ? keys.begin : 0;
  OpScope("attention", backward_flops(args, visible_pairs(block)),
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
