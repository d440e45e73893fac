// cuBLAS, as any program would call it. Its functions are looked up when the
// benchmark runs, so the benchmark is built without CUDA.

#include <dlfcn.h>

#include <chrono>
#include <memory>

#include "bench/gpu/gpu_work.h"
#include "core/check.h"
#include "core/context.h"
#include "core/ops.h"

namespace shardbook::bench {
namespace {

// Values of library_types.h and cublas_api.h.
constexpr int kCudaF32 = 0, kCudaF16 = 2, kCudaBF16 = 14;
constexpr int kNoTranspose = 0, kDefaultAlgorithm = -1;
constexpr int kComputeF32 = 68, kComputeTF32 = 77;

using Create = int(void** handle);
using GemmEx = int(void* handle, int, int, int m, int n, int k,
                   const void* alpha, const void* a, int a_type, int lda,
                   const void* b, int b_type, int ldb, const void* beta,
                   void* c, int c_type, int ldc, int compute, int algorithm);
using Synchronize = int();

/// The first file that can be loaded; null where there is none.
void* load(std::initializer_list<const char*> names) {
  for (const char* name : names) {
    if (void* file = dlopen(name, RTLD_NOW | RTLD_LOCAL)) return file;
  }
  return nullptr;
}

int cuda_type(DType dtype) {
  return dtype == DType::kBF16  ? kCudaBF16
         : dtype == DType::kF16 ? kCudaF16
                                : kCudaF32;
}

}  // namespace

std::function<double(int count)> cublas_gemm(const Work& work,
                                             std::int64_t size) {
  void* cublas = load({"libcublas.so.13", "libcublas.so.12"});
  void* driver = load({"libcuda.so.1"});
  if (cublas == nullptr || driver == nullptr) return nullptr;
  const auto create =
      reinterpret_cast<Create*>(dlsym(cublas, "cublasCreate_v2"));
  const auto gemm = reinterpret_cast<GemmEx*>(dlsym(cublas, "cublasGemmEx"));
  const auto synchronize =
      reinterpret_cast<Synchronize*>(dlsym(driver, "cuCtxSynchronize"));
  if (create == nullptr || gemm == nullptr || synchronize == nullptr) {
    return nullptr;
  }
  const Shape shape = {size, size};
  const TensorOptions options = {work.dtype};
  const Tensor a = Tensor::zeros(shape, options);
  const Tensor b = Tensor::zeros(shape, options);
  const Tensor c = Tensor::zeros(shape, options);
  // Power, and with it the clock, depends on the values
  fill_normal(a, 0, 1, 0, 1);
  fill_normal(b, 0, 2, 0, 1);
  void* handle = nullptr;
  if (create(&handle) != 0) return nullptr;
  const int compute = work.allow_tf32 ? kComputeTF32 : kComputeF32;
  const int type = cuda_type(work.dtype);
  const int n = static_cast<int>(size);
  return [=](int count) {
    using Clock = std::chrono::steady_clock;
    const float one = 1, zero = 0;
    synchronize();
    const Clock::time_point begin = Clock::now();
    for (int i = 0; i < count; ++i) {
      const int status = gemm(handle, kNoTranspose, kNoTranspose, n, n, n, &one,
                              a.raw(), type, n, b.raw(), type, n, &zero,
                              c.raw(), type, n, compute, kDefaultAlgorithm);
      SB_CHECK(status == 0, "cublasGemmEx of ", n, "^3: status ", status);
    }
    synchronize();
    const std::chrono::duration<double> seconds = Clock::now() - begin;
    return seconds.count() / count;
  };
}

}  // namespace shardbook::bench
