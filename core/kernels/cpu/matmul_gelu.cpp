// matmul_gelu and its backward as one kernel after another: the definition, and
// on any device what runs where cuBLASLt has no epilogue for it.

#include "core/kernels/matmul_gelu.h"

#include "core/kernels/elementwise.h"
#include "core/kernels/matmul_args.h"
#include "core/kernels/reduce.h"

namespace shardbook::kernels::cpu {

void matmul_gelu(KernelContext& context, DType dtype, const MatmulArgs& args,
                 const void* a, const void* b, const void* bias, void* pre,
                 void* y) {
  check_gelu_args(args);
  kernels::matmul(context, dtype, args, a, b, pre, bias);
  kernels::unary(context, UnaryOp::kGeluTanh, dtype, args.m * args.n, pre, y);
}

void matmul_gelu_backward(KernelContext& context, DType dtype,
                          const MatmulArgs& args, const void* a, const void* b,
                          const void* pre, void* dpre, void* dbias) {
  check_gelu_args(args);
  kernels::matmul(context, dtype, args, a, b, dpre);
  kernels::unary_backward(context, UnaryOp::kGeluTanh, dtype, args.m * args.n,
                          pre, dpre, dpre);
  if (dbias == nullptr) return;
  kernels::sum_rows(context, dtype, args.m, args.n, dpre, dbias);
}

}  // namespace shardbook::kernels::cpu
