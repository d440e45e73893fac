#pragma once

// Matrix products that apply GELU, or its derivative, to their results.

#include "core/dtype.h"
#include "core/kernels/kernel.h"
#include "core/kernels/matmul.h"

namespace shardbook::kernels {

/// pre = op(A) op(B) + bias, y = gelu(pre): the first layer of an MLP. `bias`
/// may be null. GELU is the tanh form (UnaryOp::kGeluTanh).
///
/// pre and y [m, n] are dense and do not overlap; batch is 1, and nothing is
/// accumulated. dtypes as for matmul.
///
/// On CUDA, cuBLASLt applies GELU before it stores the product, where it can
/// (cuda/matmul_layout.h): y of 16 bits is then computed from the sums in f32,
/// and `pre` is rounded separately. In all other cases, and on the CPU, y is
/// `unary` of the stored `pre`.
SHARDBOOK_KERNEL(matmul_gelu,
                 void(KernelContext& context, DType dtype,
                      const MatmulArgs& args, const void* a, const void* b,
                      const void* bias, void* pre, void* y));

/// dpre = op(A) op(B) * gelu'(pre), and dbias[n] = the sum of its rows unless
/// null: the backward of `matmul_gelu` and then a product whose output has the
/// gradient A. Shapes, dtypes and the use of cuBLASLt are the same.
SHARDBOOK_KERNEL(matmul_gelu_backward,
                 void(KernelContext& context, DType dtype,
                      const MatmulArgs& args, const void* a, const void* b,
                      const void* pre, void* dpre, void* dbias));

}  // namespace shardbook::kernels
