#include "core/gpus.h"

#include "core/check.h"
#include "core/internal/device_runtime.h"

namespace shardbook {

std::string why_no_gpu() {
  const std::string prefix = "cuda: ";
  const std::string reason = internal::why_no_cuda();
  return reason.compare(0, prefix.size(), prefix) == 0
             ? reason.substr(prefix.size())
             : reason;
}

int num_gpus() {
  return why_no_gpu().empty() ? internal::cuda_runtime().count() : 0;
}

Gpu gpu(int index) {
  const int count = num_gpus();
  SB_CHECK(index >= 0 && index < count, "gpu ", index, ": this machine has ",
           count);
  return internal::cuda_runtime().properties(index);
}

std::string gpu_versions() { return internal::cuda_runtime().versions(); }

}  // namespace shardbook
