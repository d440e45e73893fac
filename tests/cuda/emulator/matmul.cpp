// The product that cuBLASLt computes on a GPU: here the CPU's kernel does it, as
// one piece of work on the stream.

#include "core/kernels/matmul.h"

#include "core/kernels/cuda/matmul_layout.h"
#include "core/kernels/cuda/padding.h"
#include "core/kernels/matmul_gelu.h"
#include "tests/cuda/emulator/cpu_work.h"

namespace shardbook::kernels::cuda {

void matmul(KernelContext& context, DType dtype, const MatmulArgs& args,
            const void* a, const void* b, void* c, const void* bias) {
  const MatmulArgs padded = bias == nullptr ? padded_sizes(dtype, args) : args;
  multiply_padded(
      context, args, padded, a, b, c,
      [&](const MatmulArgs& sizes, const void* x, const void* y, void* result) {
        emulator::run_on_cpu(context, "matmul", [=](KernelContext& cpu) {
          cpu::matmul(cpu, dtype, sizes, x, y, result, bias);
        });
      });
}

void matmul_gelu(KernelContext& context, DType dtype, const MatmulArgs& args,
                 const void* a, const void* b, const void* bias, void* pre,
                 void* y) {
  if (!may_fuse_gelu(context, dtype, args)) {
    return cpu::matmul_gelu(context, dtype, args, a, b, bias, pre, y);
  }
  emulator::run_on_cpu(context, "matmul_gelu", [=](KernelContext& cpu) {
    cpu::matmul_gelu(cpu, dtype, args, a, b, bias, pre, y);
  });
}

void matmul_gelu_backward(KernelContext& context, DType dtype,
                          const MatmulArgs& args, const void* a, const void* b,
                          const void* pre, void* dpre, void* dbias) {
  if (!may_fuse_gelu(context, dtype, args)) {
    return cpu::matmul_gelu_backward(context, dtype, args, a, b, pre, dpre,
                                     dbias);
  }
  emulator::run_on_cpu(context, "matmul_gelu", [=](KernelContext& cpu) {
    cpu::matmul_gelu_backward(cpu, dtype, args, a, b, pre, dpre, dbias);
  });
}

SHARDBOOK_CUDA_KERNEL(matmul);
SHARDBOOK_CUDA_KERNEL(matmul_gelu);
SHARDBOOK_CUDA_KERNEL(matmul_gelu_backward);

}  // namespace shardbook::kernels::cuda
