// The product that cuBLASLt computes on a GPU: here the CPU's kernel does it, as
// one piece of work on the stream.

#include "core/kernels/matmul.h"

#include "tests/cuda/emulator/cpu_work.h"

namespace shardbook::kernels::cuda {

void matmul(KernelContext& context, DType dtype, const MatmulArgs& args,
            const void* a, const void* b, void* c, const void* bias) {
  emulator::run_on_cpu(context, "matmul", [=](KernelContext& cpu) {
    cpu::matmul(cpu, dtype, args, a, b, c, bias);
  });
}

SHARDBOOK_CUDA_KERNEL(matmul);

}  // namespace shardbook::kernels::cuda
