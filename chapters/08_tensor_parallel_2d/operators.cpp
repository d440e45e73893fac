#include "chapters/08_tensor_parallel_2d/operators.h"

#include "chapters/08_tensor_parallel_2d/products.h"
#include "core/autograd.h"
#include "core/check.h"
#include "core/tensor_storage.h"

namespace shardbook::summa {
namespace {

Shape with_rows(const Shape& shape, std::int64_t rows) {
  Shape result = shape;
  result.front() = rows;
  return result;
}

Tensor gathered(const Tensor& own, ProcessGroup& group) {
  return InFlight::gather(own, group).wait();
}

Tensor scattered(const Tensor& partial, ProcessGroup& group) {
  return InFlight::scatter(partial, group).wait();
}

/// [rows, 1] from [rows]: an operation with [rows, n] repeats it along the row.
Tensor column(const Tensor& values) {
  return reshape(values, {values.numel(), 1});
}

}  // namespace

InFlight InFlight::gather(const Tensor& own, ProcessGroup& group) {
  InFlight call;
  call.input_ = own;
  call.result_ = own;
  if (group.size() == 1) return call;
  call.result_ = Tensor::empty(
      with_rows(own.shape(), own.size(0) * group.size()), own.options());
  call.work_ = group.all_gather(call.result_, own);
  return call;
}

InFlight InFlight::scatter(const Tensor& partial, ProcessGroup& group) {
  SB_CHECK(partial.size(0) % group.size() == 0, "reduce_scatter over \"",
           group.name(), "\": ", partial.size(0), " rows do not divide over ",
           group.size(), " ranks");
  InFlight call;
  call.input_ = partial;
  call.result_ = partial;
  if (group.size() == 1) return call;
  call.result_ =
      Tensor::empty(with_rows(partial.shape(), partial.size(0) / group.size()),
                    partial.options());
  call.work_ = group.reduce_scatter(call.result_, partial);
  return call;
}

Tensor InFlight::wait() {
  work_.wait();
  input_ = Tensor();
  return result_;
}

Tensor as_matrix(const Tensor& x) { return reshape(x, {-1, x.size(-1)}); }

Shape with_last(Shape shape, std::int64_t last) {
  shape.back() = last;
  return shape;
}

Tensor replicated(const Tensor& parameter, ProcessGroup* group) {
  if (group == nullptr || group->size() == 1) return parameter;
  Tensor y = parameter.detach();
  autograd::record("replicated", {parameter}, {y},
                   [group](const Tensors& grads) {
                     group->all_reduce(grads[0]).wait();
                     return grads;
                   });
  set_stands_for_parameter(y);
  return y;
}

Tensor sum_over(const Tensor& partial, ProcessGroup& group) {
  if (group.size() == 1) return partial;
  return autograd::custom_function(
      "sum_over", {partial},
      [&](const Tensors& in) {
        Tensor sum = in[0].clone();
        group.all_reduce(sum).wait();
        return Tensors{sum};
      },
      [](const Tensors& grads) { return grads; })[0];
}

Tensor gather_rows(const Tensor& own, ProcessGroup& group) {
  if (group.size() == 1) return own;
  return autograd::custom_function(
      "gather_rows", {own},
      [&](const Tensors& in) { return Tensors{gathered(in[0], group)}; },
      [own, &group](const Tensors& grads) {
        const GradientScope kind(own);
        return Tensors{scattered(grads[0], group)};
      })[0];
}

Tensor scatter_rows(const Tensor& partial, ProcessGroup& group) {
  if (group.size() == 1) return partial;
  return autograd::custom_function(
      "scatter_rows", {partial},
      [&](const Tensors& in) { return Tensors{scattered(in[0], group)}; },
      [&group](const Tensors& grads) {
        return Tensors{gathered(grads[0], group)};
      })[0];
}

Tensor gather_columns(const Tensor& own, ProcessGroup& group) {
  if (group.size() == 1) return own;
  if (own.ndim() == 1) return gather_rows(own, group);
  // Collectives put pieces end to end along dim 0: [P, rows, n/P]
  const std::int64_t n = own.size(-1), ranks = group.size();
  const std::int64_t rows = own.numel() / n;
  return autograd::custom_function(
      "gather_columns", {own},
      [&](const Tensors& in) {
        const Tensor all = gathered(reshape(in[0], {1, rows, n}), group);
        Shape shape = own.shape();
        shape.back() = ranks * n;
        return Tensors{reshape(transpose(all, 0, 1), shape)};
      },
      [=, &group](const Tensors& grads) {
        const Tensor pieces =
            transpose(reshape(grads[0], {rows, ranks, n}), 0, 1);
        const GradientScope kind(own);
        return Tensors{reshape(scattered(pieces, group), own.shape())};
      })[0];
}

// --- Norm ----------------------------------------------------------------------

namespace {

/// Sums of the rows of each matrix over the ranks: [matrices, rows].
Tensor row_sums(const Tensors& matrices, ProcessGroup& group) {
  const auto n = static_cast<std::int64_t>(matrices.size());
  const std::int64_t rows = matrices[0].size(0);
  const Tensor sums = Tensor::empty({n, rows}, matrices[0].options());
  for (std::int64_t i = 0; i < n; ++i) {
    const Tensor& each = matrices[static_cast<std::size_t>(i)];
    sums.rows_view(i, i + 1).copy_from(reshape(sum(each, 1), {1, rows}));
  }
  group.all_reduce(sums).wait();
  return sums;
}

Tensor inverse_root(const Tensor& squares, double eps) {
  return div(Tensor::full(squares.shape(), 1, squares.options()),
             sqrt(add_scalar(squares, eps)));
}

/// Statistics of 16-bit rows are computed in f32.
Tensor widened(const Tensor& x) {
  const bool is_narrow = x.dtype() == DType::kBF16 || x.dtype() == DType::kF16;
  return is_narrow ? to_dtype(x, DType::kF32) : x;
}

Tensor normalized(const Tensor& x, const Tensor& mean, const Tensor& rstd) {
  return mul(sub(as_matrix(widened(x)), column(mean)), column(rstd));
}

}  // namespace

Tensor split_layer_norm(const Tensor& x, const Tensor& gamma,
                        const Tensor& beta, ProcessGroup& group, double eps) {
  if (group.size() == 1) return layer_norm(x, gamma, beta, eps);
  const double width = static_cast<double>(x.size(-1)) * group.size();
  Tensor y, mean, rstd;
  {
    const NoGrad no_grad;
    Tensor rows = as_matrix(widened(x));
    const Tensor means =
        scale(row_sums({rows, square(rows)}, group), 1 / width);
    rows = Tensor();
    mean = means.rows_view(0, 1).clone();
    const Tensor variance = sub(means.rows_view(1, 2), square(mean));
    rstd = inverse_root(variance, eps);
    y = add(mul(normalized(x, mean, rstd), widened(gamma)), widened(beta));
    y = reshape(to_dtype(y, x.dtype()), x.shape()).detach();
  }
  autograd::record(
      "split_layer_norm", {x, gamma, beta}, {y},
      [=, &group](const Tensors& grads) {
        const Tensor dy = as_matrix(widened(grads[0]));
        const Tensor xhat = normalized(x, mean, rstd);
        Tensors result(3);
        if (x.requires_grad()) {
          const Tensor dz = mul(dy, widened(gamma));
          const Tensor means =
              scale(row_sums({dz, mul(dz, xhat)}, group), 1 / width);
          const Tensor mean_dz = column(means.rows_view(0, 1));
          const Tensor mean_dz_xhat = column(means.rows_view(1, 2));
          const Tensor dx =
              mul(sub(sub(dz, mean_dz), mul(xhat, mean_dz_xhat)), column(rstd));
          result[0] = reshape(to_dtype(dx, x.dtype()), x.shape());
        }
        result[1] = to_dtype(sum(mul(dy, xhat), 0), gamma.dtype());
        result[2] = to_dtype(sum(dy, 0), beta.dtype());
        return result;
      });
  return y;
}

Tensor split_rms_norm(const Tensor& x, const Tensor& gamma, ProcessGroup& group,
                      double eps) {
  if (group.size() == 1) return rms_norm(x, gamma, eps);
  const double width = static_cast<double>(x.size(-1)) * group.size();
  const auto mean_over_ranks = [width, &group](const Tensor& matrix) {
    return scale(row_sums({matrix}, group), 1 / width);
  };
  Tensor y, rstd;
  {
    const NoGrad no_grad;
    const Tensor rows = as_matrix(widened(x));
    rstd = inverse_root(mean_over_ranks(square(rows)), eps);
    // Rounded before gamma multiplies it, as on one device
    const Tensor xhat = to_dtype(mul(rows, column(rstd)), x.dtype());
    y = reshape(mul(xhat, gamma), x.shape()).detach();
  }
  autograd::record(
      "split_rms_norm", {x, gamma}, {y}, [=](const Tensors& grads) {
        const Tensor dy = as_matrix(widened(grads[0]));
        const Tensor xhat = mul(as_matrix(widened(x)), column(rstd));
        Tensors result(2);
        if (x.requires_grad()) {
          const Tensor dz = mul(dy, widened(gamma));
          const Tensor along = column(mean_over_ranks(mul(dz, xhat)));
          const Tensor dx = mul(sub(dz, mul(xhat, along)), column(rstd));
          result[0] = reshape(to_dtype(dx, x.dtype()), x.shape());
        }
        result[1] = to_dtype(sum(mul(dy, xhat), 0), gamma.dtype());
        return result;
      });
  return y;
}

// --- Attention and dropout -----------------------------------------------------

Tensor block_attention(const Tensor& qkv, const AttentionOptions& options,
                       const BlockPlace& at) {
  AttentionOptions own = options;
  const std::int64_t b = qkv.size(0), s = qkv.size(1);
  own.shard = {{b * at.rows, own.heads * at.columns, s, s},
               {b * at.row, own.heads * at.column, 0, 0},
               {}};
  return attention(qkv, own);
}

Tensor block_dropout(const Tensor& x, double p, const BlockPlace& at) {
  ShardView view{x.shape(), std::vector<std::int64_t>(x.shape().size(), 0), {}};
  view.global_shape.front() *= at.rows;
  view.global_shape.back() *= at.columns;
  view.offset.front() = at.row * x.size(0);
  view.offset.back() = at.column * x.size(-1);
  return dropout(x, p, view);
}

// --- Loss ----------------------------------------------------------------------

Tensor split_cross_entropy(const Tensor& logits, const Tensor& targets,
                           std::int64_t first, ProcessGroup& group,
                           std::int64_t vocabulary, Reduction reduction) {
  if (group.size() == 1) return cross_entropy(logits, targets, reduction);
  if (vocabulary == 0) vocabulary = logits.size(-1) * group.size();
  return cross_entropy_part(
      logits, targets, first, vocabulary,
      [&group](const Tensor& x, bool is_max) {
        group.all_reduce(x, is_max ? ReduceOp::kMax : ReduceOp::kSum, "loss")
            .wait();
      },
      reduction);
}

}  // namespace shardbook::summa
