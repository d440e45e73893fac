#pragma once

// Element-wise kernels. Inputs and outputs may be the same array (but may not
// overlap in part).

#include <cstdint>

#include "core/dtype.h"
#include "core/kernels/kernel.h"

namespace shardbook::kernels {

enum class BinaryOp { kAdd, kSub, kMul, kDiv };

enum class UnaryOp {
  kNeg,
  kAbs,
  kRelu,
  kGeluTanh,
  kGeluErf,
  kTanh,
  kSigmoid,
  kSquare,
  kSqrt,
  kExp,
  kLog,
};

/// x[i] = value, rounded to `dtype`. All dtypes.
SHARDBOOK_KERNEL(fill, void(KernelContext& context, DType dtype, std::int64_t n,
                            void* x, double value));

/// x[i] = factor * value[0], computed in f64 and rounded once. All dtypes.
SHARDBOOK_KERNEL(repeat,
                 void(KernelContext& context, DType dtype, std::int64_t n,
                      double factor, const void* value, void* x));

/// to[i] = from[i], converted: floats round to nearest even, floats to
/// integers truncate. All pairs of dtypes; equal dtypes copy bytes. The arrays
/// do not overlap.
SHARDBOOK_KERNEL(cast, void(KernelContext& context, DType from_dtype,
                            const void* from, DType to_dtype, void* to,
                            std::int64_t n));

/// out = a op b with NumPy's broadcasting: shapes align at the last dim, and a
/// size of 1 (or a missing dim) repeats. `out` has the broadcast shape; it may
/// be `a` or `b` when that has the broadcast shape itself. All dtypes; integer
/// division truncates and throws Error for a zero divisor.
/// Throws Error when the shapes do not broadcast or have more than 8 dims.
SHARDBOOK_KERNEL(binary, void(KernelContext& context, BinaryOp op, DType dtype,
                              const Dims& a_shape, const void* a,
                              const Dims& b_shape, const void* b, void* out));

/// The shape that two shapes broadcast to; throws Error when they do not.
Dims broadcast_shape(const Dims& a, const Dims& b);

/// y[i] = factor * x[i]. All dtypes; integers take an integral factor.
SHARDBOOK_KERNEL(scale,
                 void(KernelContext& context, DType dtype, std::int64_t n,
                      double factor, const void* x, void* y));

/// y[i] = x[i] + value. All dtypes.
SHARDBOOK_KERNEL(add_scalar,
                 void(KernelContext& context, DType dtype, std::int64_t n,
                      double value, const void* x, void* y));

/// y[i] += a * x[i]. All dtypes; a == 1 is a plain sum.
SHARDBOOK_KERNEL(axpy, void(KernelContext& context, DType dtype, std::int64_t n,
                            double a, const void* x, void* y));

/// y[i] = op(x[i]). Floating dtypes; f32 within 4 ulp or so (2e-7 relative;
/// gelu 1e-6).
SHARDBOOK_KERNEL(unary, void(KernelContext& context, UnaryOp op, DType dtype,
                             std::int64_t n, const void* x, void* y));

/// Whether the backward of `op` wants the output y (tanh, sigmoid, sqrt, exp)
/// rather than the input x (all others).
bool backward_uses_output(UnaryOp op);

/// dx[i] = dy[i] * op'(...), from the array that `backward_uses_output` names.
/// dx may be dy or `saved`. relu'(0) = 0, abs'(0) = 0.
SHARDBOOK_KERNEL(unary_backward,
                 void(KernelContext& context, UnaryOp op, DType dtype,
                      std::int64_t n, const void* saved, const void* dy,
                      void* dx));

}  // namespace shardbook::kernels
