#include "tests/cuda/parity.h"

#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "core/check.h"
#include "core/kernels/cuda/check.h"
#include "tests/cuda/emulator/emulator.h"

namespace shardbook::parity {
namespace {

constexpr int kSeeds = 3;

// Its kernels register themselves while it is loaded.
void load_kernels() {
  static void* const library = [] {
    const char* chosen = std::getenv("SHARDBOOK_CUDA_LIBRARY");
    void* found =
        dlopen(chosen != nullptr ? chosen : SHARDBOOK_EMULATED_LIBRARY,
               RTLD_NOW | RTLD_LOCAL);
    SB_CHECK(found != nullptr, "parity: ", dlerror());
    return found;
  }();
  (void)library;
}

void expect_near(double expected, double found, double tolerance,
                 const std::string& what) {
  if (std::isnan(expected) && std::isnan(found)) return;
  if (expected == found) return;
  ASSERT_LE(std::fabs(found - expected),
            tolerance * (1.0 + std::fabs(expected)))
      << what << ": " << expected << " on the CPU, " << found << " on CUDA";
  ASSERT_FALSE(std::isnan(found - expected))
      << what << ": " << expected << " on the CPU, " << found << " on CUDA";
}

}  // namespace

const std::vector<std::int64_t>& lengths() {
  static const std::vector<std::int64_t> all = {0,  1,   2,   7,   31,   32,
                                                33, 255, 256, 257, 1000, 5003};
  return all;
}

// Scratch comes back when the stream is waited for: kernels that use it may run
// later than the call that asked for it.
struct CudaContext::Memory : ScratchProvider {
  void* acquire(std::size_t bytes) override {
    void* data = nullptr;
    SHARDBOOK_CUDA(cudaMalloc(&data, bytes), bytes, " bytes");
    return data;
  }
  void release(void* pointer) override { released.push_back(pointer); }
  void free_all() {
    for (void* pointer : released) SHARDBOOK_CUDA(cudaFree(pointer));
    released.clear();
  }
  std::vector<void*> released;
  cudaStream_t stream = nullptr;
};

CudaContext::CudaContext() : memory_(std::make_unique<Memory>()) {
  load_kernels();
  SHARDBOOK_CUDA(
      cudaStreamCreateWithFlags(&memory_->stream, cudaStreamNonBlocking));
  context_ = std::make_unique<KernelContext>(memory_.get(), DeviceType::kCuda);
  context_->stream = memory_->stream;
}

CudaContext::~CudaContext() {
  (void)cudaStreamSynchronize(memory_->stream);
  context_.reset();
  for (void* pointer : memory_->released) (void)cudaFree(pointer);
  (void)cudaStreamDestroy(memory_->stream);
}

void CudaContext::synchronize() {
  SHARDBOOK_CUDA(cudaStreamSynchronize(memory_->stream));
  memory_->free_all();
}

DeviceArray::DeviceArray(std::size_t bytes) : bytes_(bytes) {
  SHARDBOOK_CUDA(cudaMalloc(&data_, bytes), bytes, " bytes");
}
DeviceArray::~DeviceArray() {
  const cudaError_t error = cudaFree(data_);
  EXPECT_EQ(error, cudaSuccess) << cudaGetErrorString(error);
}

void DeviceArray::write(CudaContext& context, const void* from) {
  SHARDBOOK_CUDA(
      cudaMemcpyAsync(data_, from, bytes_, cudaMemcpyDefault,
                      static_cast<cudaStream_t>(context.kernels().stream)));
}

void DeviceArray::read(CudaContext& context, void* to) const {
  SHARDBOOK_CUDA(
      cudaMemcpyAsync(to, data_, bytes_, cudaMemcpyDefault,
                      static_cast<cudaStream_t>(context.kernels().stream)));
  context.synchronize();
}

Comparison::Comparison() = default;
Comparison::~Comparison() { emulator::set_seed(0); }

Slot Comparison::array(DType dtype, const std::vector<double>& values) {
  return array(Array(dtype, values));
}

Slot Comparison::array(Array values) {
  auto side = std::make_unique<Side>();
  const std::size_t bytes =
      static_cast<std::size_t>(values.size()) * dtype_bytes(values.dtype());
  side->before = side->cpu = std::move(values);
  side->cuda = std::make_unique<DeviceArray>(bytes);
  sides_.push_back(std::move(side));
  return {static_cast<int>(sides_.size()) - 1};
}

Slot Comparison::empty(DType dtype, std::int64_t n) {
  Array values(dtype, n);
  if (n > 0) {
    std::memset(values.data(), 0xff,
                static_cast<std::size_t>(n) * dtype_bytes(dtype));
  }
  return array(std::move(values));
}

Slot Comparison::bytes(std::size_t n) {
  // Whole elements of four bytes; what is over stays as it is.
  const Slot slot = empty(DType::kI32, static_cast<std::int64_t>((n + 3) / 4));
  sides_.back()->is_exact = true;
  return slot;
}

Pointer Comparison::on_cpu(const Slot& slot) {
  return {slot.index < 0 ? nullptr : sides_[slot.index]->cpu.data()};
}
Pointer Comparison::on_cuda(const Slot& slot) {
  return {slot.index < 0 ? nullptr : sides_[slot.index]->cuda->data()};
}

bool Comparison::begin(int seed) {
  if (seed == kSeeds) return false;
  emulator::set_seed(static_cast<std::uint64_t>(seed));
  order_ = "seed " + std::to_string(seed);
  for (const auto& side : sides_) {
    side->cuda->write(cuda_, side->before.data());
  }
  return true;
}

Array Comparison::cuda_array(Slot slot) {
  Array found = sides_[slot.index]->before;
  sides_[slot.index]->cuda->read(cuda_, found.data());
  return found;
}

void Comparison::compare() {
  cuda_.synchronize();
  for (std::size_t i = 0; i < sides_.size(); ++i) {
    const Array found = cuda_array({static_cast<int>(i)});
    const Array& expected = sides_[i]->cpu;
    const std::string name = order_ + ", array " + std::to_string(i);
    if (sides_[i]->is_exact) {
      EXPECT_TRUE(found == expected) << name;
      continue;
    }
    const std::vector<double> a = expected.values(), b = found.values();
    for (std::size_t k = 0; k < a.size(); ++k) {
      expect_near(a[k], b[k], tolerance_,
                  name + ", element " + std::to_string(k));
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

void Comparison::compare_results(double expected, double found) const {
  expect_near(expected, found, tolerance_, order_ + ", the result");
}

}  // namespace shardbook::parity
