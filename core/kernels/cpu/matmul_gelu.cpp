#include "core/kernels/matmul_gelu.h"

#include "core/kernels/matmul_gelu_apart.h"

namespace shardbook::kernels::cpu {

void matmul_gelu(KernelContext& context, DType dtype, const MatmulArgs& args,
                 const void* a, const void* b, const void* bias, void* pre,
                 void* y) {
  matmul_gelu_apart(context, dtype, args, a, b, bias, pre, y);
}

void matmul_gelu_backward(KernelContext& context, DType dtype,
                          const MatmulArgs& args, const void* a, const void* b,
                          const void* pre, void* dpre, void* dbias) {
  matmul_gelu_backward_apart(context, dtype, args, a, b, pre, dpre, dbias);
}

}  // namespace shardbook::kernels::cpu
