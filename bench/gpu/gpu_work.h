#pragma once

// The works of `./shardbook bench gpu`: what each computes, and its time here,
// in cuBLAS and in PyTorch.

#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>

#include "core/dtype.h"

namespace shardbook::bench {

/// One thing to measure. `make` allocates its buffers, which live as long as
/// the function that it returns.
struct Work {
  std::string name;  ///< "gemm-bf16": pytorch_gpu.py knows it by this name
  std::string text;  ///< "product 8192^3, bf16"
  std::function<std::function<void()>()> make = {};
  double flops = 0;  ///< of one call; 0: none are counted
  double bytes = 0;  ///< read and written by one call
  DType dtype = DType::kF32;
  bool allow_tf32 = false;
};

struct Sizes {
  std::int64_t gemm = 8192;
  std::int64_t copy_bytes = std::int64_t{1} << 30;
  std::string gpt = "gpt2";
  std::int64_t batch = 16, seq = 1024;
  std::string resnet = "resnet50";
  std::int64_t images = 256, image_size = 224;
};

/// Calls cuBLAS directly, as the yardstick of products: returns seconds for
/// each of `count` products. Empty where no cuBLAS is found.
std::function<double(int count)> cublas_gemm(const Work& work,
                                             std::int64_t size);

/// Another program that measures the same works: see pytorch_gpu.py.
class Peer {
 public:
  /// Starts `python script`; waits until it is ready.
  Peer(const std::string& python, const std::string& script,
       const Sizes& sizes);
  ~Peer();
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  /// Why it cannot measure; empty where it can.
  const std::string& why_not() const { return why_not_; }
  const std::string& version() const { return version_; }
  /// Seconds per call, over `count` calls; negative when the work failed there.
  double seconds(const std::string& work, int count);
  /// Frees what the work has allocated.
  void drop(const std::string& work);

 private:
  std::string ask(const std::string& line);

  int child_ = -1;
  FILE* to_ = nullptr;
  FILE* from_ = nullptr;
  std::string why_not_, version_;
};

}  // namespace shardbook::bench
