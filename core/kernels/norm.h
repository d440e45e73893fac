#pragma once

// Layer normalisation, and batch normalisation in the pieces that a
// synchronised one needs. "stat" arrays are f64 for f64, otherwise f32.

#include <cstdint>

#include "core/dtype.h"
#include "core/kernels/kernel.h"

namespace shardbook::kernels {

/// y[r] = (x[r] - mean[r]) * rstd[r] * gamma + beta, rows normalised alone.
///
///   x, y         [rows, cols]; y may be x
///   gamma, beta  [cols], or null for ones and zeros
///   mean, rstd   [rows] stat, written; rstd = 1 / sqrt(variance + eps) with
///                the biased variance
SHARDBOOK_KERNEL(layer_norm,
                 void(KernelContext& context, DType dtype, std::int64_t rows,
                      std::int64_t cols, double eps, const void* x,
                      const void* gamma, const void* beta, void* y, void* mean,
                      void* rstd));

/// Gradients of layer_norm. dx may be dy or null; dgamma and dbeta [cols] may
/// be null and are added to when `accumulate`.
SHARDBOOK_KERNEL(layer_norm_backward,
                 void(KernelContext& context, DType dtype, std::int64_t rows,
                      std::int64_t cols, const void* x, const void* gamma,
                      const void* mean, const void* rstd, const void* dy,
                      void* dx, void* dgamma, void* dbeta, bool accumulate));

/// The shape of images or features: [batch, channels, inner].
struct ChannelShape {
  std::int64_t batch = 0;
  std::int64_t channels = 0;
  std::int64_t inner = 1;
};

/// sums[c] = sum over batch and inner of x. Add over ranks, divide by the
/// global count, and the mean is known.
SHARDBOOK_KERNEL(channel_sums,
                 void(KernelContext& context, DType dtype,
                      const ChannelShape& shape, const void* x, double* sums));

/// sums[c] = sum of (x - mean[c])^2. Add over ranks, divide by the global
/// count, and the biased variance is known.
SHARDBOOK_KERNEL(channel_centered_squares,
                 void(KernelContext& context, DType dtype,
                      const ChannelShape& shape, const void* x,
                      const double* mean, double* sums));

/// y = (x - mean[c]) * rstd[c] * gamma[c] + beta[c]; y may be x; gamma and beta
/// may be null.
SHARDBOOK_KERNEL(channel_normalize,
                 void(KernelContext& context, DType dtype,
                      const ChannelShape& shape, const void* x,
                      const double* mean, const double* rstd, const void* gamma,
                      const void* beta, void* y));

/// sum_dy[c] = sum of dy, sum_dy_xhat[c] = sum of dy * (x - mean) * rstd: the
/// gradients of beta and gamma, and what ranks add up for dx.
SHARDBOOK_KERNEL(channel_backward_sums,
                 void(KernelContext& context, DType dtype,
                      const ChannelShape& shape, const void* x, const void* dy,
                      const double* mean, const double* rstd, double* sum_dy,
                      double* sum_dy_xhat));

/// dx = gamma * rstd * (dy - sum_dy / count - xhat * sum_dy_xhat / count), with
/// the sums and the count over all ranks. dx may be dy.
SHARDBOOK_KERNEL(channel_backward,
                 void(KernelContext& context, DType dtype,
                      const ChannelShape& shape, const void* x, const void* dy,
                      const double* mean, const double* rstd, const void* gamma,
                      const double* sum_dy, const double* sum_dy_xhat,
                      double count, void* dx));

}  // namespace shardbook::kernels
