// Stands in for core/kernels/cuda/runtime.cpp until it is there.

#include <cstring>

#include "core/kernels/cuda/check.h"
#include "core/kernels/cuda/state.h"

namespace shardbook::kernels::cuda {

CudaState::CudaState() {
  SHARDBOOK_CUDA(cudaMallocHost(&error, sizeof(DeviceError)));
  *error = DeviceError();
  SHARDBOOK_CUDA(cudaMallocHost(&result, 64));
}
CudaState::~CudaState() {
  (void)cudaFreeHost(error);
  (void)cudaFreeHost(result);
}
CudaState& cuda_state(KernelContext& context) {
  if (context.cuda_state == nullptr) {
    context.cuda_state = std::make_shared<CudaState>();
  }
  return *static_cast<CudaState*>(context.cuda_state.get());
}
void read_result(KernelContext& context, void* to, const void* from,
                 std::size_t bytes) {
  CudaState& state = cuda_state(context);
  const auto stream = static_cast<cudaStream_t>(context.stream);
  SHARDBOOK_CUDA(
      cudaMemcpyAsync(state.result, from, bytes, cudaMemcpyDefault, stream));
  SHARDBOOK_CUDA(cudaStreamSynchronize(stream));
  SB_CHECK(state.error->code == 0, "kernel error ", state.error->code, ": ",
           state.error->value, " is not in ", state.error->first, " .. ",
           state.error->last);
  std::memcpy(to, state.result, bytes);
}

}  // namespace shardbook::kernels::cuda
