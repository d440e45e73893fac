// What does the same works elsewhere.
//
// cuBLAS is called as any program would call it. Its functions are looked up when
// the benchmark runs, so the benchmark is built without CUDA.

#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <vector>

#include "bench/gpu/gpu_work.h"
#include "bench/timing.h"
#include "core/check.h"
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
    const float one = 1, zero = 0;
    synchronize();
    const double begin_s = now_s();
    for (int i = 0; i < count; ++i) {
      const int status = gemm(handle, kNoTranspose, kNoTranspose, n, n, n, &one,
                              a.raw(), type, n, b.raw(), type, n, &zero,
                              c.raw(), type, n, compute, kDefaultAlgorithm);
      SB_CHECK(status == 0, "cublasGemmEx of ", n, "^3: status ", status);
    }
    synchronize();
    return (now_s() - begin_s) / count;
  };
}

// ---- PyTorch

Peer::Peer(const std::string& python, const std::string& script,
           const Sizes& sizes) {
  int down[2], up[2];
  SB_CHECK(pipe(down) == 0 && pipe(up) == 0, "no pipe can be made");
  const auto number = [](std::int64_t value) { return std::to_string(value); };
  const std::vector<std::string> words = {
      python,         script,
      "--gemm",       number(sizes.gemm),
      "--copy",       number(sizes.copy_bytes),
      "--gpt",        sizes.gpt,
      "--resnet",     sizes.resnet,
      "--batch",      number(sizes.batch),
      "--seq",        number(sizes.seq),
      "--images",     number(sizes.images),
      "--image-size", number(sizes.image_size)};
  std::vector<char*> arguments;
  for (const std::string& word : words) {
    arguments.push_back(const_cast<char*>(word.c_str()));
  }
  arguments.push_back(nullptr);
  child_ = fork();
  SB_CHECK(child_ >= 0, "no process can be started");
  if (child_ == 0) {
    dup2(down[0], STDIN_FILENO);
    dup2(up[1], STDOUT_FILENO);
    for (const int end : {down[0], down[1], up[0], up[1]}) close(end);
    // A pack brings libraries along that PyTorch must not see
    if (const char* own = std::getenv("SHARDBOOK_PYTORCH_LIBRARIES")) {
      setenv("LD_LIBRARY_PATH", own, 1);
    }
    execvp(arguments[0], arguments.data());
    _exit(127);
  }
  close(down[0]);
  close(up[1]);
  to_ = fdopen(down[1], "w");
  from_ = fdopen(up[0], "r");
  const std::string first = ask("hello");
  if (first.rfind("ready ", 0) == 0) {
    version_ = first.substr(6);
  } else if (first.rfind("no ", 0) == 0) {
    why_not_ = first.substr(3);
  } else {
    why_not_ = python + " does not run";
  }
}

Peer::~Peer() {
  std::fclose(to_);  // it ends at the end of its input
  std::fclose(from_);
  waitpid(child_, nullptr, 0);
}

std::string Peer::ask(const std::string& line) {
  // A peer that has ended: its answer is empty
  if (std::fputs((line + "\n").c_str(), to_) < 0 || std::fflush(to_) != 0) {
    return "";
  }
  char answer[512];
  if (std::fgets(answer, sizeof(answer), from_) == nullptr) return "";
  answer[std::strcspn(answer, "\n")] = '\0';
  return answer;
}

double Peer::seconds(const std::string& work, int count) {
  const std::string answer = ask(work + " " + std::to_string(count));
  char* end = nullptr;
  const double seconds = std::strtod(answer.c_str(), &end);
  if (end != answer.c_str() && *end == '\0') return seconds;
  std::fprintf(stderr, "PyTorch, %s: %s\n", work.c_str(), answer.c_str());
  return -1;
}

void Peer::drop(const std::string& work) { ask("drop " + work); }

}  // namespace shardbook::bench
