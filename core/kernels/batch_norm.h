#pragma once

// Batch normalisation of a matrix [rows, channels]; images [n, height, width,
// channels] count as one. Statistics are f64, added up block by block in a
// fixed order.

#include <cstdint>

#include "core/dtype.h"
#include "core/kernels/kernel.h"

namespace shardbook::kernels {

/// sums[c] = sum of x, squares[c] = sum of (x - sums[c] / rows)^2, in one pass.
SHARDBOOK_KERNEL(row_moments,
                 void(KernelContext& context, DType dtype, std::int64_t rows,
                      std::int64_t channels, const void* x, double* sums,
                      double* squares));

/// y = relu((x - mean) * rstd * gamma + beta + addend).
struct RowNorm {
  std::int64_t rows = 0, channels = 0;
  const double* mean = nullptr;  ///< [channels]
  const double* rstd = nullptr;  ///< [channels]
  const void* gamma = nullptr;   ///< [channels]
  const void* beta = nullptr;    ///< [channels]
  bool relu = false;
};

/// `addend` [rows, channels] or null. y may be x or the addend.
SHARDBOOK_KERNEL(row_normalize,
                 void(KernelContext& context, DType dtype, const RowNorm& norm,
                      const void* x, const void* addend, void* y));

/// With dz = dy where the ReLU passed x through (all of dy without one):
/// sum_dz[c] = sum of dz, sum_dz_xhat[c] = sum of dz * (x - mean) * rstd.
///
/// Where `y` is given, the ReLU passed the elements that are positive in y, and
/// dz is written (it may be dy). Otherwise y = relu(normalised x) is computed
/// once more, and dz is not written.
SHARDBOOK_KERNEL(row_norm_backward_sums,
                 void(KernelContext& context, DType dtype, const RowNorm& norm,
                      const void* x, const void* y, const void* dy, void* dz,
                      double* sum_dz, double* sum_dz_xhat));

/// dx = gamma * rstd * (dz - sum_dz / count - xhat * sum_dz_xhat / count).
/// `dy` is dz where that was written (with norm.relu off), dy otherwise. dx may
/// be dy.
SHARDBOOK_KERNEL(row_norm_backward,
                 void(KernelContext& context, DType dtype, const RowNorm& norm,
                      const void* x, const void* dy, const double* sum_dz,
                      const double* sum_dz_xhat, double count, void* dx));

// Between the passes over the data, these turn the ranks' sums into mean and
// variance. All arrays are f64, and the count of values follows the sums, so
// the host waits for nothing.

/// Squares around this rank's mean become squares around the common mean, by
/// the parallel axis theorem. `local` [channels + 1]: this rank's sums and
/// count, which is not 0.
SHARDBOOK_KERNEL(channel_shift_squares,
                 void(KernelContext& context, std::int64_t channels,
                      const double* local, const double* mean,
                      double* squares));

/// rstd[c] = 1 / sqrt(variance[c] + eps).
SHARDBOOK_KERNEL(channel_rstd,
                 void(KernelContext& context, std::int64_t channels,
                      const double* variance, double eps, double* rstd));

/// running[c] = keep * running[c] + share * now[c], computed in f64 and rounded
/// to `dtype`.
SHARDBOOK_KERNEL(channel_blend,
                 void(KernelContext& context, DType dtype,
                      std::int64_t channels, double keep, double share,
                      const double* now, void* running));

}  // namespace shardbook::kernels
