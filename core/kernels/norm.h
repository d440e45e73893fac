#pragma once

// Layer normalisation, and RMSNorm, which has no mean and no beta. "stat" arrays
// are f64 for f64, otherwise f32.

#include <cstdint>

#include "core/dtype.h"
#include "core/kernels/kernel.h"

namespace shardbook::kernels {

/// y[r] = (x[r] - mean[r]) * rstd[r] * gamma + beta, rows normalised alone.
///
///   x, y         [rows, cols]; y may be x
///   gamma, beta  [cols]
///   mean, rstd   [rows] stat, written; rstd = 1 / sqrt(variance + eps) with
///                the biased variance
SHARDBOOK_KERNEL(layer_norm,
                 void(KernelContext& context, DType dtype, std::int64_t rows,
                      std::int64_t cols, double eps, const void* x,
                      const void* gamma, const void* beta, void* y, void* mean,
                      void* rstd));

/// Gradients of layer_norm. dx may be dy or null; dgamma and dbeta [cols] may
/// both be null.
SHARDBOOK_KERNEL(layer_norm_backward,
                 void(KernelContext& context, DType dtype, std::int64_t rows,
                      std::int64_t cols, const void* x, const void* gamma,
                      const void* mean, const void* rstd, const void* dy,
                      void* dx, void* dgamma, void* dbeta));

/// y[r] = weight * (x[r] * rstd[r]), where the product in brackets is rounded to
/// `dtype` before weight multiplies it (16 bits round twice).
///
///   x, y    [rows, cols]; y may be x
///   weight  [cols]
///   rstd    [rows] stat, written; rstd = 1 / sqrt(mean of x^2 + eps)
///
/// Rows may be as narrow as the head of an attention: on CUDA a warp works on
/// four of up to 128 elements.
SHARDBOOK_KERNEL(rms_norm,
                 void(KernelContext& context, DType dtype, std::int64_t rows,
                      std::int64_t cols, double eps, const void* x,
                      const void* weight, void* y, void* rstd));

/// Gradients of rms_norm. dx may be dy or null; dweight [cols] may be null. The
/// gradient passes the rounding unchanged.
SHARDBOOK_KERNEL(rms_norm_backward,
                 void(KernelContext& context, DType dtype, std::int64_t rows,
                      std::int64_t cols, const void* x, const void* weight,
                      const void* rstd, const void* dy, void* dx,
                      void* dweight));

}  // namespace shardbook::kernels
