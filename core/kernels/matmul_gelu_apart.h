#pragma once

// matmul_gelu and its backward as one kernel after another, on any device: the
// definition, and what CUDA runs where cuBLASLt has no epilogue for it.

#include "core/kernels/elementwise.h"
#include "core/kernels/matmul_args.h"
#include "core/kernels/matmul_gelu.h"
#include "core/kernels/reduce.h"

namespace shardbook::kernels {

inline void matmul_gelu_apart(KernelContext& context, DType dtype,
                              const MatmulArgs& original, const void* a,
                              const void* b, const void* bias, void* pre,
                              void* y) {
  const MatmulArgs args = checked_gelu_args(original);
  kernels::matmul(context, dtype, args, a, b, pre, bias);
  kernels::unary(context, UnaryOp::kGeluTanh, dtype, args.m * args.n, pre, y);
}

inline void matmul_gelu_backward_apart(KernelContext& context, DType dtype,
                                       const MatmulArgs& original,
                                       const void* a, const void* b,
                                       const void* pre, void* dpre,
                                       void* dbias) {
  const MatmulArgs args = checked_gelu_args(original);
  kernels::matmul(context, dtype, args, a, b, dpre);
  kernels::unary_backward(context, UnaryOp::kGeluTanh, dtype, args.m * args.n,
                          pre, dpre, dpre);
  if (dbias == nullptr) return;
  kernels::sum_rows(context, dtype, args.m, args.n, dpre, dbias);
}

}  // namespace shardbook::kernels
