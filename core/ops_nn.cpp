// Embedding, normalisation of rows, SwiGLU, softmax and dropout.

#include "core/internal/op_scope.h"
#include "core/internal/random_position.h"
#include "core/kernels/embedding.h"
#include "core/kernels/norm.h"
#include "core/kernels/random.h"
#include "core/kernels/softmax.h"
#include "core/kernels/swiglu.h"
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

Tensor look_up(const Tensor& table, const Tensor& indices,
               const kernels::TableShape& table_shape) {
  SB_CHECK(!is_floating(indices.dtype()), "embedding: indices are ",
           dtype_name(indices.dtype()), "; give i64 or i32");
  internal::check_same_device("embedding", table, indices);
  Shape shape = indices.shape();
  shape.push_back(table.size(1));
  Tensor y = Tensor::empty(shape, table.options());
  OpScope("embedding", 0, bytes_of({&indices, &y, &y}), y)
      .run(kernels::gather_rows, table.dtype(), table_shape, table.raw(),
           indices.dtype(), indices.raw(), indices.numel(), y.raw());
  record("embedding", {table}, {y},
         [table, indices, table_shape](const Tensors& grads) {
           // Deferred like the others: a table that is also the head's weight
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

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  internal::check_same_kind("rms_norm", x, weight);
  const Rows n = rows_of("rms_norm", x);
  SB_CHECK(weight.shape() == Shape{n.cols}, "rms_norm: weight ",
           shape_text(weight.shape()), " for input ", shape_text(x.shape()));
  Tensor y = x.empty_like();
  Tensor rstd =
      Tensor::empty({n.rows}, {internal::stat_dtype(x.dtype()), x.device()});
  OpScope("rms_norm", 5 * count(x), bytes_of({&x, &y}), x)
      .run(kernels::rms_norm, x.dtype(), n.rows, n.cols, eps, x.raw(),
           weight.raw(), y.raw(), rstd.raw());
  record("rms_norm", {x, weight}, {y},
         [x, weight, rstd, n](const Tensors& grads) {
           const Tensor& dy = grads[0];
           Tensor dx, dweight;
           if (x.requires_grad()) dx = dy.empty_like();
           if (weight.requires_grad()) {
             dweight = internal::gradient_like(weight);
           }
           OpScope("rms_norm", 11 * count(dy), bytes_of({&x, &dy, &dx}), dy)
               .run(kernels::rms_norm_backward, dy.dtype(), n.rows, n.cols,
                    x.raw(), weight.raw(), rstd.raw(), dy.raw(),
                    raw_or_null(dx), raw_or_null(dweight));
           return Tensors{dx, dweight};
         });
  return y;
}

Tensor swiglu(const Tensor& gate_up) {
  const Rows n = rows_of("swiglu", gate_up);
  SB_CHECK(n.cols % 2 == 0, "swiglu: rows of ", n.cols,
           " columns have no two halves [gate | up]");
  Shape shape = gate_up.shape();
  shape.back() /= 2;
  Tensor y = Tensor::empty(shape, gate_up.options());
  OpScope("swiglu", 5 * count(y), bytes_of({&gate_up, &y}), y)
      .run(kernels::swiglu, y.dtype(), n.rows, shape.back(), gate_up.raw(),
           y.raw());
  internal::pass_mark("swiglu", y, gate_up);
  record("swiglu", {gate_up}, {y}, [gate_up, n](const Tensors& grads) {
    const Tensor& dy = grads[0];
    Tensor dgate_up = gate_up.empty_like();
    OpScope("swiglu", 11 * count(dy), bytes_of({&gate_up, &dy, &dgate_up}), dy)
        .run(kernels::swiglu_backward, dy.dtype(), n.rows, n.cols / 2,
             gate_up.raw(), dy.raw(), dgate_up.raw());
    return Tensors{dgate_up};
  });
  return y;
}

namespace {

Tensor softmax_or_log(const char* name, const Tensor& x, bool log) {
  const Rows n = rows_of(name, x);
  Tensor y = x.empty_like();
  OpScope(name, 5 * count(x), bytes_of({&x, &y}), x)
      .run(kernels::softmax, x.dtype(), n.rows, n.cols, x.raw(), y.raw(), log);
  if (!needs_grad({x})) return y;
  record(name, {x}, {y},
         [name, n, log, saved = y.detach()](const Tensors& grads) {
           const Tensor& dy = grads[0];
           Tensor dx = dy.empty_like();
           OpScope(name, 4 * count(dy), bytes_of({&saved, &dy, &dx}), dy)
               .run(kernels::softmax_backward, dy.dtype(), n.rows, n.cols,
                    saved.raw(), dy.raw(), dx.raw(), log);
           return Tensors{dx};
         });
  return y;
}

}  // namespace

Tensor softmax(const Tensor& x) { return softmax_or_log("softmax", x, false); }

Tensor log_softmax(const Tensor& x) {
  return softmax_or_log("log_softmax", x, true);
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

}  // namespace shardbook
