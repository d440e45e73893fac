// Layers and losses.

#include <cmath>

#include "core/internal/cuda_device.h"
#include "core/internal/op_scope.h"
#include "core/internal/random_position.h"
#include "core/kernels/attention.h"
#include "core/kernels/elementwise.h"
#include "core/kernels/embedding.h"
#include "core/kernels/norm.h"
#include "core/kernels/random.h"
#include "core/kernels/reduce.h"
#include "core/kernels/softmax.h"
#include "core/ops.h"

namespace shardbook {

using autograd::needs_grad;
using autograd::record;
using internal::bytes_of;
using internal::count;
using internal::global_view;
using internal::GradientOf;
using internal::next_random_key;
using internal::OpScope;
using internal::raw_or_null;

namespace {

struct Rows {
  std::int64_t rows, cols;
};

Rows rows_of(const char* op, const Tensor& x) {
  SB_CHECK(x.ndim() >= 1, op, ": a scalar has no last dim");
  const std::int64_t cols = x.size(-1);
  return {cols == 0 ? 0 : x.numel() / cols, cols};
}

void check_same_device(const char* op, const Tensor& a, const Tensor& b) {
  SB_CHECK(a.device() == b.device(), op, ": devices ", a.device().name(),
           " and ", b.device().name(), " differ; copy one of them");
}

Tensor look_up(const Tensor& table, const Tensor& indices,
               const kernels::TableShape& table_shape) {
  SB_CHECK(!is_floating(indices.dtype()), "embedding: indices are ",
           dtype_name(indices.dtype()), "; give i64 or i32");
  check_same_device("embedding", table, indices);
  Shape shape = indices.shape();
  shape.push_back(table.size(1));
  Tensor y = Tensor::empty(shape, table.options());
  OpScope("embedding", 0, bytes_of({&indices, &y, &y}), y)
      .run(kernels::gather_rows, table.dtype(), table_shape, table.raw(),
           indices.dtype(), indices.raw(), indices.numel(), y.raw());
  record("embedding", {table}, {y},
         [table, indices, table_shape](const Tensors& grads) {
           // Put off like the others: a table that is also the head's weight
           // must sum its gradients in the order of backward
           auto compute = [table, indices, table_shape, dy = grads[0]] {
             Tensor dtable = Tensor::zeros(table.shape(), table.options());
             OpScope("embedding", count(dy), bytes_of({&indices, &dy, &dtable}),
                     dy)
                 .run(kernels::scatter_add_rows, dy.dtype(), table_shape,
                      dtable.raw(), indices.dtype(), indices.raw(),
                      indices.numel(), dy.raw());
             return dtable;
           };
           return Tensors{internal::weight_gradient(table, compute)};
         });
  return y;
}

void check_table(const Tensor& table) {
  SB_CHECK(table.ndim() == 2, "embedding: the table has shape ",
           shape_text(table.shape()), "; give [rows, columns]");
}

}  // namespace

Tensor embedding(const Tensor& table, const Tensor& indices) {
  check_table(table);
  return look_up(table, indices, {table.size(0), table.size(1)});
}

Tensor embedding_part(const Tensor& table, const Tensor& indices,
                      std::int64_t first_row) {
  check_table(table);
  return look_up(table, indices,
                 {table.size(0), table.size(1), first_row, true});
}

Tensor layer_norm(const Tensor& x, const Tensor& gamma, const Tensor& beta,
                  double eps) {
  internal::check_same_kind("layer_norm", x, gamma);
  internal::check_same_kind("layer_norm", x, beta);
  const Rows n = rows_of("layer_norm", x);
  SB_CHECK(gamma.shape() == Shape{n.cols} && beta.shape() == Shape{n.cols},
           "layer_norm: gamma ", shape_text(gamma.shape()), " and beta ",
           shape_text(beta.shape()), " for input ", shape_text(x.shape()));
  const DType stat = internal::stat_dtype(x.dtype());
  Tensor y = x.empty_like();
  Tensor mean = Tensor::empty({n.rows}, {stat, x.device()});
  Tensor rstd = Tensor::empty({n.rows}, {stat, x.device()});
  OpScope("layer_norm", 8 * count(x), bytes_of({&x, &y}), x)
      .run(kernels::layer_norm, x.dtype(), n.rows, n.cols, eps, x.raw(),
           gamma.raw(), beta.raw(), y.raw(), mean.raw(), rstd.raw());
  record("layer_norm", {x, gamma, beta}, {y},
         [x, gamma, beta, mean, rstd, n](const Tensors& grads) {
           const Tensor& dy = grads[0];
           Tensor dx, dgamma, dbeta;
           if (x.requires_grad()) dx = dy.empty_like();
           if (gamma.requires_grad() || beta.requires_grad()) {
             GradientOf kind(gamma);
             dgamma = gamma.empty_like();
             dbeta = beta.empty_like();
           }
           OpScope("layer_norm", 16 * count(dy), bytes_of({&x, &dy, &dx}), dy)
               .run(kernels::layer_norm_backward, dy.dtype(), n.rows, n.cols,
                    x.raw(), gamma.raw(), mean.raw(), rstd.raw(), dy.raw(),
                    raw_or_null(dx), raw_or_null(dgamma), raw_or_null(dbeta));
           return Tensors{dx, gamma.requires_grad() ? dgamma : Tensor(),
                          beta.requires_grad() ? dbeta : Tensor()};
         });
  return y;
}

namespace {

using RowKernel = kernels::Kernel<void(KernelContext&, DType, std::int64_t,
                                       std::int64_t, const void*, void*)>;
using RowBackward =
    kernels::Kernel<void(KernelContext&, DType, std::int64_t, std::int64_t,
                         const void*, const void*, void*)>;

Tensor row_op(const char* name, const Tensor& x, const RowKernel& forward,
              const RowBackward& backward) {
  const Rows n = rows_of(name, x);
  Tensor y = x.empty_like();
  OpScope(name, 5 * count(x), bytes_of({&x, &y}), x)
      .run(forward, x.dtype(), n.rows, n.cols, x.raw(), y.raw());
  if (!needs_grad({x})) return y;
  record(name, {x}, {y},
         [name, n, &backward, saved = y.detach()](const Tensors& grads) {
           const Tensor& dy = grads[0];
           Tensor dx = dy.empty_like();
           OpScope(name, 4 * count(dy), bytes_of({&saved, &dy, &dx}), dy)
               .run(backward, dy.dtype(), n.rows, n.cols, saved.raw(), dy.raw(),
                    dx.raw());
           return Tensors{dx};
         });
  return y;
}

}  // namespace

Tensor softmax(const Tensor& x) {
  return row_op("softmax", x, kernels::softmax, kernels::softmax_backward);
}

Tensor log_softmax(const Tensor& x) {
  return row_op("log_softmax", x, kernels::log_softmax,
                kernels::log_softmax_backward);
}

// --- Attention -------------------------------------------------------------------

namespace {

struct AttentionShape {
  std::int64_t batch, q_rows, k_rows, width;
};

/// Heads of `head_dim` columns inside rows that are `row` elements apart.
kernels::HeadStrides heads_in(std::int64_t rows, std::int64_t row,
                              std::int64_t head_dim) {
  return {rows * row, head_dim, row};
}

kernels::AttentionArgs attention_args(const AttentionShape& shape,
                                      const AttentionOptions& options) {
  SB_CHECK(options.heads > 0 && shape.width % options.heads == 0,
           "attention: ", options.heads, " heads do not divide a width of ",
           shape.width);
  kernels::AttentionArgs args;
  args.batch = shape.batch;
  args.heads = options.heads;
  args.kv_heads = options.kv_heads;
  args.q_rows = shape.q_rows;
  args.k_rows = shape.k_rows;
  args.head_dim = shape.width / options.heads;
  args.causal = options.causal;
  args.scale = options.scale != 0
                   ? options.scale
                   : 1.0 / std::sqrt(static_cast<double>(args.head_dim));
  args.out = heads_in(shape.q_rows, shape.width, args.head_dim);
  args.dropout = options.dropout;
  if (options.dropout > 0) args.dropout_key = next_random_key("attention");
  args.dropout_view = global_view(
      {shape.batch, options.heads, shape.q_rows, shape.k_rows}, options.shard);
  return args;
}

/// Multiply-adds of one product of queries with the keys they may see.
double attention_flops(const kernels::AttentionArgs& args) {
  const auto q = static_cast<double>(args.q_rows);
  const auto k = static_cast<double>(args.k_rows);
  const double pairs = args.causal ? q * (k + 1) / 2 : q * k;
  return 2 * pairs *
         static_cast<double>(args.batch * args.heads * args.head_dim);
}

/// Attention of {qkv}, or of {q, k, v}.
Tensor attend(const Tensors& inputs, const kernels::AttentionArgs& args) {
  const Tensor& q = inputs[0];
  const Tensor out = Tensor::empty(
      {args.batch, args.q_rows, args.heads * args.head_dim}, q.options());
  const Tensor lse =
      Tensor::empty({args.batch, args.heads, args.q_rows},
                    {internal::stat_dtype(q.dtype()), q.device()});
  const auto part = [](const Tensors& x, std::size_t i) {
    return x.size() == 3 ? x[i].raw()
                         : internal::address_of(x[0], i * x[0].size(2) / 3);
  };
  double bytes = bytes_of({&out});
  for (const Tensor& input : inputs) bytes += bytes_of({&input});
  const ProductShape product = {args.q_rows, args.k_rows, args.head_dim,
                                args.batch * args.heads};
  OpScope("attention", 2 * attention_flops(args), bytes, q, product)
      .run(kernels::attention, q.dtype(), args, part(inputs, 0),
           part(inputs, 1), part(inputs, 2), out.raw(), lse.raw());
  record("attention", inputs, {out},
         [=, out = out.detach()](const Tensors& grads) {
           const Tensor& dout = grads[0];
           Tensors result;
           for (const Tensor& input : inputs)
             result.push_back(input.empty_like());
           OpScope("attention", 5 * attention_flops(args), 2 * bytes, dout,
                   product)
               .run(kernels::attention_backward, dout.dtype(), args,
                    kernels::AttentionGradStrides{args.q, args.k, args.v,
                                                  args.out},
                    part(inputs, 0), part(inputs, 1), part(inputs, 2),
                    out.raw(), dout.raw(), lse.raw(), part(result, 0),
                    part(result, 1), part(result, 2), false);
           return result;
         });
  return out;
}

}  // namespace

Tensor attention(const Tensor& qkv, const AttentionOptions& options) {
  SB_CHECK(qkv.ndim() == 3 && qkv.size(2) % 3 == 0, "attention: qkv has shape ",
           shape_text(qkv.shape()), "; give [batch, sequence, 3 * width]");
  SB_CHECK(options.kv_heads == 0 || options.kv_heads == options.heads,
           "attention: packed [q | k | v] has one width; with ",
           options.kv_heads, " heads of keys, give q, k and v");
  const std::int64_t b = qkv.size(0), s = qkv.size(1), h = qkv.size(2) / 3;
  kernels::AttentionArgs args = attention_args({b, s, s, h}, options);
  args.q = args.k = args.v = heads_in(s, 3 * h, args.head_dim);
  return attend({qkv}, args);
}

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v,
                 const AttentionOptions& options) {
  internal::check_same_kind("attention", q, k);
  internal::check_same_kind("attention", q, v);
  SB_CHECK(q.ndim() == 3 && k.ndim() == 3 && k.shape() == v.shape() &&
               q.size(0) == k.size(0),
           "attention: shapes q ", shape_text(q.shape()), ", k ",
           shape_text(k.shape()), ", v ", shape_text(v.shape()),
           "; give [batch, rows, width] with one batch");
  kernels::AttentionArgs args =
      attention_args({q.size(0), q.size(1), k.size(1), q.size(2)}, options);
  const std::int64_t kv_heads =
      options.kv_heads == 0 ? options.heads : options.kv_heads;
  SB_CHECK(kv_heads > 0 && options.heads % kv_heads == 0 &&
               k.size(2) == kv_heads * args.head_dim,
           "attention: keys of width ", k.size(2), " for ", kv_heads, " of ",
           options.heads, " heads of ", args.head_dim, " columns");
  args.q = heads_in(q.size(1), q.size(2), args.head_dim);
  args.k = args.v = heads_in(k.size(1), k.size(2), args.head_dim);
  return attend({q, k, v}, args);
}

// --- Dropout ---------------------------------------------------------------------

Tensor dropout(const Tensor& x, double p, const ShardView& shard) {
  SB_CHECK(p >= 0 && p < 1, "dropout: probability ", p,
           " is not in the range 0 to below 1");
  if (p == 0) return x;
  const kernels::RandomKey key = next_random_key("dropout");
  const kernels::GlobalView view = global_view(x.shape(), shard);
  auto apply = [key, view, p](const Tensor& from) {
    Tensor to = from.empty_like();
    OpScope("dropout", 2 * count(from), bytes_of({&from, &to}), from)
        .run(kernels::dropout, from.dtype(), view, key, p, from.raw(),
             to.raw());
    return to;
  };
  Tensor y = apply(x);
  internal::pass_mark("dropout", y, x);
  // The mask is drawn again from the same key: nothing is kept.
  record("dropout", {x}, {y},
         [apply](const Tensors& grads) { return Tensors{apply(grads[0])}; });
  return y;
}

// --- Losses ------------------------------------------------------------------------

Tensor cross_entropy(const Tensor& logits, const Tensor& targets,
                     Reduction reduction) {
  const Rows n = rows_of("cross_entropy", logits);
  SB_CHECK(targets.dtype() == DType::kI64 && targets.numel() == n.rows,
           "cross_entropy: targets ", dtype_name(targets.dtype()),
           shape_text(targets.shape()), " for logits ",
           shape_text(logits.shape()), "; give one i64 per row");
  check_same_device("cross_entropy", logits, targets);
  const DType stat = internal::stat_dtype(logits.dtype());
  Tensor loss = Tensor::empty({}, {stat, logits.device()});
  Tensor lse = Tensor::empty({n.rows}, {stat, logits.device()});
  const bool mean = reduction == Reduction::kMean;
  {
    Tensor losses = lse.empty_like();
    OpScope scope("cross_entropy", 5 * count(logits), bytes_of({&logits}),
                  logits);
    if (scope.runs()) {
      kernels::cross_entropy(scope.kernels(), logits.dtype(), n.rows, n.cols,
                             logits.raw(), targets.data<std::int64_t>(),
                             losses.raw(), lse.raw());
      kernels::reduce_losses(scope.kernels(), stat, n.rows, losses.raw(),
                             targets.data<std::int64_t>(), mean, loss.raw());
    }
  }
  record("cross_entropy", {logits}, {loss},
         [logits, targets, lse, n, mean](const Tensors& grads) {
           Tensor dlogits = logits.empty_like();
           OpScope("cross_entropy", 3 * count(logits),
                   bytes_of({&logits, &dlogits}), logits)
               .run(kernels::cross_entropy_backward, logits.dtype(), n.rows,
                    n.cols, logits.raw(), targets.data<std::int64_t>(),
                    lse.raw(), grads[0].raw(), mean, dlogits.raw());
           return Tensors{dlogits};
         });
  return loss;
}

Tensor mse_loss(const Tensor& x, const Tensor& target) {
  SB_CHECK(x.shape() == target.shape(), "mse_loss: shapes ",
           shape_text(x.shape()), " and ", shape_text(target.shape()),
           " differ");
  return mean(square(sub(x, target)));
}

}  // namespace shardbook
