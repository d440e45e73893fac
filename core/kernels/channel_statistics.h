#pragma once

// Statistics of channels between the passes over the data: what ranks have
// added up becomes a mean and a variance. All arrays are f64, and the count of
// values lies behind the sums, so the host waits for nothing.

#include <cstdint>

#include "core/kernels/kernel.h"
#include "core/kernels/norm.h"

namespace shardbook::kernels {

/// sums[c] = sum of x, squares[c] = sum of (x - sums[c] / values)^2, where each
/// channel has batch * inner values. kernels/batch_norm.h has the same for
/// matrices, in one pass.
SHARDBOOK_KERNEL(channel_moments, void(KernelContext& context, DType dtype,
                                       const ChannelShape& shape, const void* x,
                                       double* sums, double* squares));

/// sums[c] /= count[0]: sums become means.
SHARDBOOK_KERNEL(channel_divide,
                 void(KernelContext& context, std::int64_t channels,
                      const double* count, double* sums));

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
