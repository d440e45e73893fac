#pragma once

// Reductions. The order of additions is fixed by the shape alone: 16-bit and
// f32 rows add in f32 blocks, sums over everything add in f64.

#include <cstdint>

#include "core/dtype.h"
#include "core/kernels/kernel.h"

namespace shardbook::kernels {

/// out[c] = sum over r of x[r, c]: x [rows, cols], out [cols]; floating dtypes.
/// Bias gradients.
SHARDBOOK_KERNEL(sum_rows,
                 void(KernelContext& context, DType dtype, std::int64_t rows,
                      std::int64_t cols, const void* x, void* out));

/// out = x summed over the dims that broadcasting `out_shape` to `x_shape`
/// repeats: the backward of broadcasting. Floating dtypes; up to 8 dims.
/// Throws Error when out_shape does not broadcast to x_shape.
SHARDBOOK_KERNEL(sum_to_shape,
                 void(KernelContext& context, DType dtype, const Dims& x_shape,
                      const void* x, const Dims& out_shape, void* out));

/// y[0] = factor times the sum of all elements, added in f64 and rounded to
/// `dtype`. All dtypes. The host waits
/// for nothing.
SHARDBOOK_KERNEL(sum_all_into,
                 void(KernelContext& context, DType dtype, std::int64_t n,
                      double factor, const void* x, void* y));

/// Sum of squares, added in f64. Floating dtypes.
SHARDBOOK_KERNEL(sum_squares, double(KernelContext& context, DType dtype,
                                     std::int64_t n, const void* x));

/// max |a[i] - b[i]|, in f64; 0 for n = 0. A difference that is NaN makes the
/// result NaN; equal infinities differ by 0. All dtypes.
SHARDBOOK_KERNEL(max_abs_difference,
                 double(KernelContext& context, DType dtype, std::int64_t n,
                        const void* a, const void* b));

}  // namespace shardbook::kernels
