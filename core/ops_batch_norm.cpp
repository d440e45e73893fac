// Batch normalisation over the last dim: [.., channels].

#include "core/internal/op_scope.h"
#include "core/internal/transfers.h"
#include "core/kernels/batch_norm.h"
#include "core/kernels/elementwise.h"
#include "core/ops.h"

namespace shardbook {

using autograd::record;
using internal::bytes_of;
using internal::count;
using internal::OpScope;
using internal::raw_or_null;

namespace {

std::int64_t rows_of(const Tensor& x) {
  return x.numel() == 0 ? 0 : x.numel() / x.size(-1);
}

void check_operands(const Tensor& x, const Tensor& gamma, const Tensor& beta) {
  SB_CHECK(x.ndim() >= 2, "batch_norm: shape ", shape_text(x.shape()),
           "; give [.., channels]");
  for (const Tensor& parameter : {gamma, beta}) {
    internal::check_same_kind("batch_norm", x, parameter);
    SB_CHECK(parameter.shape() == Shape{x.size(-1)}, "batch_norm: a parameter ",
             shape_text(parameter.shape()), " for ", x.size(-1), " channels");
  }
}

Tensor rstd_of(const Tensor& variance, double eps) {
  Tensor rstd = variance.empty_like();
  if (variance.is_meta()) return rstd;
  kernels::channel_rstd(RankContext::current().kernels(variance.device()),
                        variance.numel(), variance.data<double>(), eps,
                        rstd.data<double>());
  return rstd;
}

/// `sums` become means.
void divide(KernelContext& context, const Tensor& sums, const Tensor& count) {
  kernels::binary(context, kernels::BinaryOp::kDiv, DType::kF64, {sums.numel()},
                  sums.raw(), {1}, count.raw(), sums.raw());
}

/// Mean and variance of x over all ranks: two calls of sum_over_ranks.
void compute_statistics(OpScope& scope, const Tensor& x,
                        const SumOverRanks& sum_over_ranks,
                        BatchNormResult& result) {
  const std::int64_t c = x.size(-1), rows = rows_of(x);
  const TensorOptions stat{DType::kF64, x.device()};
  result.variance = Tensor::zeros({c}, stat);
  // One message carries the sums and, behind them, the count.
  Tensor sums = Tensor::zeros({c + 1}, stat);
  const Tensor count = sums.rows_view(c, c + 1);
  result.count = static_cast<double>(rows);
  if (scope.runs() && rows > 0) {
    kernels::row_moments(scope.kernels(), x.dtype(), rows, c, x.raw(),
                         sums.data<double>(), result.variance.data<double>());
    kernels::fill(scope.kernels(), DType::kF64, 1, count.raw(), result.count);
  }
  const Tensor local = sum_over_ranks ? sums.clone() : sums;
  if (sum_over_ranks) sum_over_ranks(sums);
  result.mean = sums.rows_view(0, c).clone();
  if (scope.runs()) {
    divide(scope.kernels(), result.mean, count);
    if (sum_over_ranks) {
      // The one value that the host reads
      internal::read_to_host(&result.count, count);
      // Around the common mean
      if (rows > 0) {
        kernels::channel_shift_squares(scope.kernels(), c, local.data<double>(),
                                       result.mean.data<double>(),
                                       result.variance.data<double>());
      }
    }
  }
  if (sum_over_ranks) sum_over_ranks(result.variance);
  if (scope.runs()) divide(scope.kernels(), result.variance, count);
}

/// Everything that the backward of one normalisation needs.
struct Normalisation {
  Tensor x, gamma, beta, mean, rstd;
  double count = 0;
  bool relu = false;
  SumOverRanks sum_over_ranks;

  kernels::RowNorm rows() const {
    return {rows_of(x),
            x.size(-1),
            mean.data<double>(),
            rstd.data<double>(),
            gamma.raw(),
            beta.raw(),
            relu};
  }
};

/// `y` is the output, kept where there was an addend: it holds the ReLU's mask.
Tensors backward(const Normalisation& norm, const Tensor& y, bool has_addend,
                 const Tensor& dy) {
  const Tensor& x = norm.x;
  const std::int64_t c = x.size(-1);
  Tensor dx = x.empty_like();
  Tensor dz = y.defined() ? x.empty_like() : Tensor();
  const Tensor sums = Tensor::zeros({2, c}, {DType::kF64, x.device()});
  const Tensor sum_dz = sums.flat_view(0, {c});
  const Tensor sum_dz_xhat = sums.flat_view(c, {c});
  Tensor dgamma = internal::gradient_like(norm.gamma);
  Tensor dbeta = internal::gradient_like(norm.beta);
  OpScope scope("batch_norm", 12 * count(x),
                bytes_of({&x, &x, &dy, &dy, &dx, &y, &dz}), x);
  scope.run(kernels::row_norm_backward_sums, x.dtype(), norm.rows(), x.raw(),
            raw_or_null(y), dy.raw(), raw_or_null(dz), sum_dz.data<double>(),
            sum_dz_xhat.data<double>());
  // gamma and beta see this rank's rows only: their gradients are reduced with
  // all the others.
  dbeta.copy_from(sum_dz);
  dgamma.copy_from(sum_dz_xhat);
  if (norm.sum_over_ranks) norm.sum_over_ranks(sums);
  const Tensor& behind_relu = dz.defined() ? dz : dy;
  kernels::RowNorm rows = norm.rows();
  rows.relu = rows.relu && !dz.defined();
  scope.run(kernels::row_norm_backward, x.dtype(), rows, x.raw(),
            behind_relu.raw(), sum_dz.data<double>(),
            sum_dz_xhat.data<double>(), norm.count, dx.raw());
  if (!has_addend) return {dx, dgamma, dbeta};
  return {dx, dgamma, dbeta, behind_relu};
}

}  // namespace

BatchNormResult batch_norm_train(const Tensor& x, const Tensor& gamma,
                                 const Tensor& beta,
                                 const BatchNormOptions& options) {
  const Tensor& addend = options.addend;
  Normalisation norm;
  check_operands(x, gamma, beta);
  SB_CHECK(!addend.defined() || addend.shape() == x.shape(),
           "batch_norm: addend ", shape_text(addend.shape()), " for input ",
           shape_text(x.shape()));
  if (addend.defined()) internal::check_same_kind("batch_norm", x, addend);
  BatchNormResult result;
  result.y = x.empty_like();
  {
    OpScope scope("batch_norm", 8 * count(x),
                  bytes_of({&x, &x, &addend, &result.y}), x);
    compute_statistics(scope, x, options.sum_over_ranks, result);
    norm.x = x, norm.gamma = gamma, norm.beta = beta;
    norm.mean = result.mean;
    norm.rstd = rstd_of(result.variance, options.eps);
    norm.count = result.count;
    norm.relu = options.relu;
    norm.sum_over_ranks = options.sum_over_ranks;
    scope.run(kernels::row_normalize, x.dtype(), norm.rows(), x.raw(),
              raw_or_null(addend), result.y.raw());
  }
  // Without an addend the ReLU's mask is computed again from x.
  const bool keeps_y = options.relu && addend.defined();
  Tensors inputs = {x, gamma, beta};
  if (addend.defined()) inputs.push_back(addend);
  record("batch_norm", inputs, {result.y},
         [norm, y = keeps_y ? result.y.detach() : Tensor(),
          has_addend = addend.defined()](const Tensors& grads) {
           return backward(norm, y, has_addend, grads[0]);
         });
  return result;
}

Tensor batch_norm_eval(const Tensor& x, const Tensor& gamma, const Tensor& beta,
                       const Tensor& mean, const Tensor& variance, double eps) {
  check_operands(x, gamma, beta);
  const Tensor rstd =
      to_dtype(rstd_of(to_dtype(variance, DType::kF64), eps), x.dtype());
  const Tensor factor = mul(gamma, rstd);
  return add(mul(x, factor), sub(beta, mul(to_dtype(mean, x.dtype()), factor)));
}

}  // namespace shardbook
