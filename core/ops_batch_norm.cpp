// Batch normalisation, over [n, c] (channels last) and [n, c, ..].

#include "core/internal/op_scope.h"
#include "core/internal/transfers.h"
#include "core/kernels/batch_norm.h"
#include "core/kernels/channel_statistics.h"
#include "core/kernels/elementwise.h"
#include "core/kernels/norm.h"
#include "core/ops.h"

namespace shardbook {

using autograd::record;
using internal::bytes_of;
using internal::count;
using internal::OpScope;

namespace {

kernels::ChannelShape channels_of(const Tensor& x) {
  SB_CHECK(x.ndim() >= 2, "batch_norm: shape ", shape_text(x.shape()),
           "; give [batch, channels, ..]");
  kernels::ChannelShape shape;
  shape.batch = x.size(0);
  shape.channels = x.size(1);
  for (std::int64_t d = 2; d < x.ndim(); ++d) shape.inner *= x.size(d);
  return shape;
}

void check_per_channel(const Tensor& x, const Tensor& parameter) {
  internal::check_same_kind("batch_norm", x, parameter);
  SB_CHECK(parameter.shape() == Shape{x.size(1)}, "batch_norm: a parameter ",
           shape_text(parameter.shape()), " for ", x.size(1), " channels");
}

Tensor rstd_of(const Tensor& variance, double eps) {
  Tensor rstd = variance.empty_like();
  if (variance.is_meta()) return rstd;
  kernels::channel_rstd(RankContext::current().kernels(variance.device()),
                        variance.numel(), variance.data<double>(), eps,
                        rstd.data<double>());
  return rstd;
}

/// Sums of this rank's values, and of their squares around this rank's mean.
void local_moments(OpScope& scope, const kernels::ChannelShape& shape,
                   const Tensor& x, double* sums, double* squares) {
  if (shape.inner == 1) {
    kernels::row_moments(scope.kernels(), x.dtype(), shape.batch,
                         shape.channels, x.raw(), sums, squares);
  } else {
    kernels::channel_moments(scope.kernels(), x.dtype(), shape, x.raw(), sums,
                             squares);
  }
}

/// Mean and variance of x over all ranks: two calls of sum_over_ranks.
void compute_statistics(OpScope& scope, const kernels::ChannelShape& shape,
                        const Tensor& x, const SumOverRanks& sum_over_ranks,
                        BatchNormResult& result) {
  const std::int64_t c = shape.channels;
  const TensorOptions stat{DType::kF64, x.device()};
  result.variance = Tensor::zeros({c}, stat);
  // One message carries the sums and, behind them, the count.
  Tensor sums = Tensor::zeros({c + 1}, stat);
  const Tensor count = sums.rows_view(c, c + 1);
  const double local_count = static_cast<double>(shape.batch * shape.inner);
  result.count = local_count;
  if (scope.runs() && local_count > 0) {
    local_moments(scope, shape, x, sums.data<double>(),
                  result.variance.data<double>());
    kernels::fill(scope.kernels(), DType::kF64, 1, count.raw(), local_count);
  }
  const Tensor local = sum_over_ranks ? sums.clone() : sums;
  if (sum_over_ranks) sum_over_ranks(sums);
  result.mean = sums.rows_view(0, c).clone();
  if (scope.runs()) {
    kernels::channel_divide(scope.kernels(), c, count.data<double>(),
                            result.mean.data<double>());
    if (sum_over_ranks) {
      // The one value that the host reads
      internal::read_to_host(&result.count, count);
      // Around the common mean
      if (local_count > 0) {
        kernels::channel_shift_squares(scope.kernels(), c, local.data<double>(),
                                       result.mean.data<double>(),
                                       result.variance.data<double>());
      }
    }
  }
  if (sum_over_ranks) sum_over_ranks(result.variance);
  if (scope.runs()) {
    kernels::channel_divide(scope.kernels(), c, count.data<double>(),
                            result.variance.data<double>());
  }
}

/// Everything that the backward of one normalisation needs.
struct Normalisation {
  Tensor x, gamma, beta, mean, rstd;
  kernels::ChannelShape shape;
  double count = 0;
  bool relu = false;
  SumOverRanks sum_over_ranks;

  kernels::RowNorm rows() const {
    return {shape.batch,
            shape.channels,
            mean.data<double>(),
            rstd.data<double>(),
            gamma.raw(),
            beta.raw(),
            relu};
  }
};

void normalize(OpScope& scope, const Normalisation& norm, const Tensor& addend,
               const Tensor& y) {
  const Tensor& x = norm.x;
  if (norm.shape.inner == 1) {
    kernels::row_normalize(scope.kernels(), x.dtype(), norm.rows(), x.raw(),
                           addend.defined() ? addend.raw() : nullptr, y.raw());
  } else {
    kernels::channel_normalize(scope.kernels(), x.dtype(), norm.shape, x.raw(),
                               norm.mean.data<double>(),
                               norm.rstd.data<double>(), norm.gamma.raw(),
                               norm.beta.raw(), y.raw());
  }
}

/// Sums of dz and dz * xhat [2, c]; writes dz where `y` is defined.
void backward_sums(OpScope& scope, const Normalisation& norm, const Tensor& y,
                   const Tensor& dy, const Tensor& dz, double* sums) {
  const Tensor& x = norm.x;
  const std::int64_t c = norm.shape.channels;
  if (norm.shape.inner == 1) {
    kernels::row_norm_backward_sums(scope.kernels(), x.dtype(), norm.rows(),
                                    x.raw(), y.defined() ? y.raw() : nullptr,
                                    dy.raw(), dz.defined() ? dz.raw() : nullptr,
                                    sums, sums + c);
  } else {
    kernels::channel_backward_sums(scope.kernels(), x.dtype(), norm.shape,
                                   x.raw(), dy.raw(), norm.mean.data<double>(),
                                   norm.rstd.data<double>(), sums, sums + c);
  }
}

void backward_data(OpScope& scope, const Normalisation& norm, const Tensor& dz,
                   bool masked, const double* sums, const Tensor& dx) {
  const Tensor& x = norm.x;
  const std::int64_t c = norm.shape.channels;
  if (norm.shape.inner == 1) {
    kernels::RowNorm rows = norm.rows();
    rows.relu = rows.relu && !masked;
    kernels::row_norm_backward(scope.kernels(), x.dtype(), rows, x.raw(),
                               dz.raw(), sums, sums + c, norm.count, dx.raw());
  } else {
    kernels::channel_backward(scope.kernels(), x.dtype(), norm.shape, x.raw(),
                              dz.raw(), norm.mean.data<double>(),
                              norm.rstd.data<double>(), norm.gamma.raw(), sums,
                              sums + c, norm.count, dx.raw());
  }
}

/// `y` is the output, kept where there was an addend: it holds the ReLU's mask.
Tensors backward(const Normalisation& norm, const Tensor& y, bool has_addend,
                 const Tensor& dy) {
  const Tensor& x = norm.x;
  const std::int64_t c = norm.shape.channels;
  Tensor dx = x.empty_like();
  Tensor dz = y.defined() ? x.empty_like() : Tensor();
  Tensor sums = Tensor::zeros({2, c}, {DType::kF64, x.device()});
  const auto gradient_of = [](const Tensor& parameter) {
    const internal::GradientOf kind(parameter);
    return parameter.empty_like();
  };
  Tensor dgamma = gradient_of(norm.gamma), dbeta = gradient_of(norm.beta);
  OpScope scope("batch_norm", 12 * count(x),
                bytes_of({&x, &x, &dy, &dy, &dx, &y, &dz}), x);
  if (scope.runs()) {
    backward_sums(scope, norm, y, dy, dz, sums.data<double>());
  }
  // gamma and beta see this rank's rows only: their gradients are reduced with
  // all the others.
  dbeta.copy_from(sums.flat_view(0, {c}));
  dgamma.copy_from(sums.flat_view(c, {c}));
  if (norm.sum_over_ranks) norm.sum_over_ranks(sums);
  if (scope.runs()) {
    backward_data(scope, norm, dz.defined() ? dz : dy, dz.defined(),
                  sums.data<double>(), dx);
  }
  if (!has_addend) return {dx, dgamma, dbeta};
  return {dx, dgamma, dbeta, dz.defined() ? dz : dy};
}

}  // namespace

BatchNormResult batch_norm_train(const Tensor& x, const Tensor& gamma,
                                 const Tensor& beta,
                                 const BatchNormOptions& options) {
  const Tensor& addend = options.addend;
  Normalisation norm;
  norm.shape = channels_of(x);
  check_per_channel(x, gamma);
  check_per_channel(x, beta);
  SB_CHECK(!addend.defined() || addend.shape() == x.shape(),
           "batch_norm: addend ", shape_text(addend.shape()), " for input ",
           shape_text(x.shape()));
  if (norm.shape.inner != 1 && (options.relu || addend.defined())) {
    // Channels in the middle: three operations, one after another.
    BatchNormResult plain =
        batch_norm_train(x, gamma, beta, options.eps, options.sum_over_ranks);
    if (addend.defined()) plain.y = add(plain.y, addend);
    if (options.relu) plain.y = relu(plain.y);
    return plain;
  }
  if (addend.defined()) internal::check_same_kind("batch_norm", x, addend);
  BatchNormResult result;
  result.y = x.empty_like();
  {
    OpScope scope("batch_norm", 8 * count(x),
                  bytes_of({&x, &x, &addend, &result.y}), x);
    compute_statistics(scope, norm.shape, x, options.sum_over_ranks, result);
    norm.x = x, norm.gamma = gamma, norm.beta = beta;
    norm.mean = result.mean;
    norm.rstd = rstd_of(result.variance, options.eps);
    norm.count = result.count;
    norm.relu = options.relu;
    norm.sum_over_ranks = options.sum_over_ranks;
    if (scope.runs()) normalize(scope, norm, addend, result.y);
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

BatchNormResult batch_norm_train(const Tensor& x, const Tensor& gamma,
                                 const Tensor& beta, double eps,
                                 const SumOverRanks& sum_over_ranks) {
  BatchNormOptions options;
  options.eps = eps;
  options.sum_over_ranks = sum_over_ranks;
  return batch_norm_train(x, gamma, beta, options);
}

Tensor batch_norm_eval(const Tensor& x, const Tensor& gamma, const Tensor& beta,
                       const Tensor& mean, const Tensor& variance, double eps) {
  channels_of(x);  // checks the shape
  check_per_channel(x, gamma);
  check_per_channel(x, beta);
  Shape per_channel(static_cast<std::size_t>(x.ndim()), 1);
  per_channel[1] = x.size(1);
  const Tensor rstd =
      to_dtype(rstd_of(to_dtype(variance, DType::kF64), eps), x.dtype());
  const Tensor factor = mul(gamma, rstd);
  const Tensor shift = sub(beta, mul(to_dtype(mean, x.dtype()), factor));
  return add(mul(x, reshape(factor, per_channel)), reshape(shift, per_channel));
}

}  // namespace shardbook
