#pragma once

// Small arrays on the device, and what went wrong with a kernel.

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/cuda/emulator/emulator.h"

namespace emulator {

/// Device memory with the contents of a vector.
template <typename T>
class Device {
 public:
  explicit Device(const std::vector<T>& values) : size_(values.size()) {
    EXPECT_EQ(cudaMalloc(&data_, size_ * sizeof(T)), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(data_, values.data(), size_ * sizeof(T),
                         cudaMemcpyHostToDevice),
              cudaSuccess);
  }
  ~Device() { (void)cudaFree(data_); }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  T* data() const { return data_; }
  std::vector<T> values() const {
    std::vector<T> values(size_);
    EXPECT_EQ(cudaMemcpy(values.data(), data_, size_ * sizeof(T),
                         cudaMemcpyDeviceToHost),
              cudaSuccess);
    return values;
  }

 private:
  T* data_ = nullptr;
  std::size_t size_;
};

/// Runs a kernel; returns what went wrong, or nothing.
template <typename... Params>
std::string run(const char* name, dim3 grid, dim3 block,
                void (*kernel)(Params...),
                std::type_identity_t<Params>... params) {
  cudaStream_t stream;
  EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
            cudaSuccess);
  launch(name, grid, block, stream, kernel, params...);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  const cudaError_t error = cudaStreamSynchronize(stream);
  const std::string text =
      error == cudaSuccess ? "" : cudaGetErrorString(error);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  return text;
}

/// Every order that a test tries: forwards, backwards, and some shuffled.
class OverSeeds : public testing::TestWithParam<int> {
 protected:
  void SetUp() override { set_seed(static_cast<std::uint64_t>(GetParam())); }
  void TearDown() override { set_seed(0); }
};

}  // namespace emulator
