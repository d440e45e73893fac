// Convolutions of a build that found no cuDNN.

#include "core/check.h"
#include "core/kernels/conv.h"

namespace shardbook::kernels::cuda {

namespace {
[[noreturn]] void fail(const char* name) {
  SB_FAIL(name,
          ": on CUDA it needs cuDNN, which was not found when this was "
          "built; install cuDNN 9 for CUDA and build again");
}
}  // namespace

void conv2d(KernelContext&, DType, const ConvShape&, const void*, const void*,
            const void*, void*, OrderedCopies*) {
  fail("conv2d");
}
void conv2d_backward_data(KernelContext&, DType, const ConvShape&, const void*,
                          const void*, void*, OrderedCopies*) {
  fail("conv2d_backward_data");
}
void conv2d_backward_weight(KernelContext&, DType, const ConvShape&,
                            const void*, const void*, void*,
                            SharedKernelOrder*) {
  fail("conv2d_backward_weight");
}

SHARDBOOK_CUDA_KERNEL(conv2d);
SHARDBOOK_CUDA_KERNEL(conv2d_backward_data);
SHARDBOOK_CUDA_KERNEL(conv2d_backward_weight);

}  // namespace shardbook::kernels::cuda
