#pragma once

// The GPUs of this machine, and why they cannot be used.
//
//   if (why_no_gpu().empty()) {
//     Tensor x = Tensor::zeros({8}, {DType::kF32, Device::cuda(0)});
//   }
//
// Everything here also works without a GPU, and in a build without CUDA.

#include <cstdint>
#include <string>

namespace shardbook {

/// What the driver says of one GPU.
struct Gpu {
  std::string name;  ///< "NVIDIA H200"
  std::int64_t memory_bytes = 0;
  int multiprocessors = 0;
  int major = 0, minor = 0;  ///< compute capability
};

/// Why no tensor can live on a GPU here, as half a sentence ("no GPU is
/// visible"); empty where one can.
std::string why_no_gpu();
/// 0 where why_no_gpu() has a reason.
int num_gpus();
/// Throws Error unless 0 <= index < num_gpus().
Gpu gpu(int index);
/// "CUDA 13.0, driver 580.159, cuBLASLt 13.1, cuDNN 9.14". Throws Error where
/// why_no_gpu() has a reason.
std::string gpu_versions();

}  // namespace shardbook
