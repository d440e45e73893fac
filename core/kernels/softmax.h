#pragma once

// Softmax over the last dim, and its logarithm. Arrays are [rows, cols].

#include <cstdint>

#include "core/dtype.h"
#include "core/kernels/kernel.h"

namespace shardbook::kernels {

/// y = exp(x - max) / sum, or with `log` its logarithm, x - logsumexp(x). y may
/// be x. A row that is all -inf gives NaN.
SHARDBOOK_KERNEL(softmax,
                 void(KernelContext& context, DType dtype, std::int64_t rows,
                      std::int64_t cols, const void* x, void* y, bool log));

/// dx = y * (dy - sum(dy * y)), or with `log` dy - exp(y) * sum(dy), from the
/// output y. dx may be dy.
SHARDBOOK_KERNEL(softmax_backward,
                 void(KernelContext& context, DType dtype, std::int64_t rows,
                      std::int64_t cols, const void* y, const void* dy,
                      void* dx, bool log));

}  // namespace shardbook::kernels
