#include "tests/cuda/parity.h"

#include <cmath>
#include <cstring>

#include "core/check.h"
#include "core/internal/device_runtime.h"

namespace shardbook::parity {
namespace {

internal::DeviceRuntime& runtime() {
  choose_library();
  internal::DeviceRuntime& found = internal::cuda_runtime();
  found.use(0);
  return found;
}

bool is_near(double expected, double found, double tolerance) {
  return expected == found || (std::isnan(expected) && std::isnan(found)) ||
         std::fabs(found - expected) <= tolerance * (1.0 + std::fabs(expected));
}

void expect_near(double expected, double found, double tolerance,
                 const std::string& what) {
  if (is_near(expected, found, tolerance)) return;
  ASSERT_LE(std::fabs(found - expected),
            tolerance * (1.0 + std::fabs(expected)))
      << what << ": " << expected << " on the CPU, " << found << " on CUDA";
}

}  // namespace

const std::vector<std::int64_t>& lengths() {
  static const std::vector<std::int64_t> all = {0,  1,   2,   7,   31,   32,
                                                33, 255, 256, 257, 1000, 5003};
  return all;
}

std::vector<double> scaled(double factor, std::vector<double> values,
                           double shift) {
  for (double& x : values) x = factor * x + shift;
  return values;
}

// Scratch comes back when the stream is waited for: kernels that use it may run
// later than the call that asked for it.
struct CudaContext::Memory : ScratchProvider {
  void* acquire(std::size_t bytes) override {
    void* data = runtime().allocate(bytes);
    SB_CHECK(data != nullptr, "parity: no device memory for ", bytes, " bytes");
    return data;
  }
  void release(void* pointer) override { released.push_back(pointer); }
  void free_all() {
    for (void* pointer : released) runtime().free(pointer);
    released.clear();
  }
  std::vector<void*> released;
};

CudaContext::CudaContext() : memory_(std::make_unique<Memory>()) {
  void* const stream = runtime().make_stream();
  context_ = std::make_unique<KernelContext>(memory_.get(), DeviceType::kCuda);
  context_->stream = stream;
}

CudaContext::~CudaContext() {
  void* const stream = context_->stream;
  try {
    synchronize();
    context_.reset();
    runtime().destroy_stream(stream);
  } catch (const Error& error) {
    ADD_FAILURE() << error.what();
  }
}

void CudaContext::synchronize() {
  runtime().synchronize_stream(context_->stream);
  memory_->free_all();
  runtime().check_kernels(*context_);
}

DeviceArray::DeviceArray(std::size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  data_ = runtime().allocate(bytes);
  SB_CHECK(data_ != nullptr, "parity: no device memory for ", bytes, " bytes");
}
DeviceArray::DeviceArray(CudaContext& context, const Array& values)
    : DeviceArray(static_cast<std::size_t>(values.size()) *
                  dtype_bytes(values.dtype())) {
  write(context, values.data());
}
DeviceArray::~DeviceArray() {
  try {
    if (data_ != nullptr) runtime().free(data_);
  } catch (const Error& error) {
    ADD_FAILURE() << error.what();
  }
}

void DeviceArray::write(CudaContext& context, const void* from) {
  if (bytes_ == 0) return;
  runtime().copy(data_, from, bytes_, context.kernels().stream);
}

void DeviceArray::read(CudaContext& context, void* to) const {
  if (bytes_ > 0) {
    runtime().copy(to, data_, bytes_, context.kernels().stream);
  }
  context.synchronize();
}

Comparison::Comparison(DType dtype) : dtype_(dtype) {}
Comparison::~Comparison() { choose_order(0); }

Slot Comparison::array(Array values) {
  auto both = std::make_unique<Both>();
  both->cuda = std::make_unique<DeviceArray>(
      static_cast<std::size_t>(values.size()) * dtype_bytes(values.dtype()));
  both->before = both->cpu = std::move(values);
  both_.push_back(std::move(both));
  return {static_cast<int>(both_.size()) - 1};
}

Slot Comparison::empty(DType dtype, std::int64_t n) {
  Array values(dtype, n);
  if (n > 0) {
    std::memset(values.data(), 0xff,
                static_cast<std::size_t>(n) * dtype_bytes(dtype));
  }
  return array(std::move(values));
}

Pointer Comparison::Side::from(const Slot& slot, std::int64_t element) const {
  if (slot.index < 0) return {nullptr};
  Both& both = *comparison.both_[slot.index];
  void* const begin = context.device_type == DeviceType::kCuda
                          ? both.cuda->data()
                          : both.cpu.data();
  const auto bytes = static_cast<std::int64_t>(dtype_bytes(both.cpu.dtype()));
  return {static_cast<char*>(begin) + element * bytes};
}

void Comparison::keep_arrays() {
  for (const auto& each : both_) each->before = each->cpu;
}

bool Comparison::begin(int order) {
  if (order == num_orders()) return false;
  choose_order(order);
  order_ = order;
  for (const auto& each : both_) {
    each->cuda->write(cuda_, each->before.data());
  }
  return true;
}

std::string Comparison::place() const {
  std::string text = "order " + std::to_string(order_) + ", arrays of";
  for (const auto& each : both_) {
    text += " " + std::to_string(each->cpu.size());
  }
  return text + " elements, ";
}

void Comparison::compare() {
  cuda_.synchronize();
  for (std::size_t i = 0; i < both_.size(); ++i) {
    Array found = both_[i]->before;
    both_[i]->cuda->read(cuda_, found.data());
    const Array& expected = both_[i]->cpu;
    const std::string name = place() + "array " + std::to_string(i);
    const std::vector<double> a = expected.values(), b = found.values();
    for (std::size_t k = 0; k < a.size(); ++k) {
      if (is_near(a[k], b[k], tolerance_)) continue;
      expect_near(a[k], b[k], tolerance_,
                  name + ", element " + std::to_string(k));
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

void Comparison::compare_results(double expected, double found) const {
  expect_near(expected, found, tolerance_, place() + "the result");
}

}  // namespace shardbook::parity
