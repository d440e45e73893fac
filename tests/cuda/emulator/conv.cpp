// The convolutions that cuDNN computes on a GPU: here the CPU's kernels do it,
// each as one piece of work on the stream. Arrays keep their plain order.

#include "core/kernels/conv.h"

#include "tests/cuda/emulator/cpu_work.h"

namespace shardbook::kernels::cuda {

void conv2d(KernelContext& context, DType dtype, const ConvShape& shape,
            const void* x, const void* weight, const void* bias, void* y,
            OrderedCopies*) {
  emulator::run_on_cpu(context, "conv2d", [=](KernelContext& cpu) {
    cpu::conv2d(cpu, dtype, shape, x, weight, bias, y, nullptr);
  });
}

void conv2d_backward_data(KernelContext& context, DType dtype,
                          const ConvShape& shape, const void* dy,
                          const void* weight, void* dx, OrderedCopies*) {
  emulator::run_on_cpu(
      context, "conv2d_backward_data", [=](KernelContext& cpu) {
        cpu::conv2d_backward_data(cpu, dtype, shape, dy, weight, dx, nullptr);
      });
}

void conv2d_backward_weight(KernelContext& context, DType dtype,
                            const ConvShape& shape, const void* x,
                            const void* dy, void* dweight, SharedKernelOrder*) {
  emulator::run_on_cpu(
      context, "conv2d_backward_weight", [=](KernelContext& cpu) {
        cpu::conv2d_backward_weight(cpu, dtype, shape, x, dy, dweight, nullptr);
      });
}

SHARDBOOK_CUDA_KERNEL(conv2d);
SHARDBOOK_CUDA_KERNEL(conv2d_backward_data);
SHARDBOOK_CUDA_KERNEL(conv2d_backward_weight);

}  // namespace shardbook::kernels::cuda
