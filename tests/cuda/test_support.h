#pragma once

// Small arrays on the device, and what went wrong with a kernel.

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/cuda/emulator/emulator.h"

namespace emulator {

/// The call, which stands in this line, must succeed.
inline void ok(cudaError_t error, int line = __builtin_LINE()) {
  EXPECT_EQ(error, cudaSuccess) << "in line " << line;
}

/// Device memory, new or with the contents of a vector.
template <typename T>
class Device {
 public:
  explicit Device(std::size_t size) : size_(size) {
    ok(cudaMalloc(&data_, size_ * sizeof(T)));
  }
  explicit Device(const std::vector<T>& values) : Device(values.size()) {
    ok(cudaMemcpy(data_, values.data(), size_ * sizeof(T),
                  cudaMemcpyHostToDevice));
  }
  ~Device() { (void)cudaFree(data_); }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  T* data() const { return data_; }
  std::vector<T> values() const {
    std::vector<T> values(size_);
    ok(cudaMemcpy(values.data(), data_, size_ * sizeof(T),
                  cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  T* data_ = nullptr;
  std::size_t size_;
};

/// A stream and an event, for as long as these live.
class OwnStream {
 public:
  explicit OwnStream(unsigned flags = cudaStreamNonBlocking) {
    ok(cudaStreamCreateWithFlags(&stream_, flags));
  }
  ~OwnStream() { ok(cudaStreamDestroy(stream_)); }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_;
};
class OwnEvent {
 public:
  OwnEvent() { ok(cudaEventCreate(&event_)); }
  ~OwnEvent() { ok(cudaEventDestroy(event_)); }
  OwnEvent(const OwnEvent&) = delete;
  OwnEvent& operator=(const OwnEvent&) = delete;
  operator cudaEvent_t() const { return event_; }

 private:
  cudaEvent_t event_;
};

/// Runs a kernel; returns what went wrong, or nothing.
template <typename... Params>
std::string run(const char* name, dim3 grid, dim3 block,
                void (*kernel)(Params...),
                std::type_identity_t<Params>... params) {
  const OwnStream stream;
  launch(name, grid, block, stream, kernel, params...);
  ok(cudaGetLastError());
  const cudaError_t error = cudaStreamSynchronize(stream);
  return error == cudaSuccess ? "" : cudaGetErrorString(error);
}

/// Every order that a test tries: forwards, backwards, and some shuffled.
class OverSeeds : public testing::TestWithParam<int> {
 protected:
  void SetUp() override { set_seed(static_cast<std::uint64_t>(GetParam())); }
  void TearDown() override { set_seed(0); }
};

/// Two streams, and pinned memory for 40 floats.
class OnTwoStreams : public OverSeeds {
 protected:
  static constexpr int kCount = 40;
  static constexpr std::size_t kBytes = kCount * sizeof(float);

  OnTwoStreams() { ok(cudaHostAlloc(&host, kBytes, 0)); }
  ~OnTwoStreams() override { ok(cudaFreeHost(host)); }
  void TearDown() override {
    reset();
    OverSeeds::TearDown();
  }

  const OwnStream a, b;
  float* host = nullptr;
};

}  // namespace emulator
