#pragma once

// Layer normalisation. "stat" arrays are f64 for f64, otherwise f32.

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

}  // namespace shardbook::kernels
