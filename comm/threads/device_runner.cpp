#include "comm/threads/device_runner.h"

#include <algorithm>
#include <utility>

#include "comm/internal/reduce.h"
#include "core/check.h"

namespace shardbook::internal {
namespace {

// Bytes of each buffer that go through blocks at once.
constexpr std::int64_t kPartBytes = 4 << 20;

}  // namespace

DeviceRunner::KernelScratch::~KernelScratch() {
  try {
    free_released();
  } catch (const Error&) {
    // The device failed; the call that waited for it has thrown.
  }
}

void* DeviceRunner::KernelScratch::acquire(std::size_t bytes) {
  void* const data = runtime.allocate(bytes);
  SB_CHECK(data != nullptr, "out of memory: the GPU has no ", bytes,
           " bytes for sums of ranks");
  return data;
}

void DeviceRunner::KernelScratch::free_released() {
  for (void* const pointer : std::exchange(released, {})) runtime.free(pointer);
}

DeviceRunner::DeviceRunner(int gpu)
    : gpu_(gpu),
      runtime_(cuda_runtime()),
      scratch_(runtime_),
      kernels_(&scratch_, DeviceType::kCuda) {
  runtime_.use(gpu_);
  stream_ = runtime_.make_stream();
  kernels_.stream = stream_;
}

DeviceRunner::~DeviceRunner() {
  try {
    runtime_.use(gpu_);
    runtime_.synchronize_stream(stream_);
    if (block_ != nullptr) runtime_.free(block_);
    runtime_.destroy_stream(stream_);
  } catch (const Error&) {
    // The device failed; the call that waited for it has thrown.
  }
}

void DeviceRunner::combine(DType dtype, ReduceOp op,
                           const std::vector<const void*>& inputs,
                           const std::vector<void*>& outputs,
                           std::int64_t count, bool is_near) {
  if (is_near) {
    kernels::combine(kernels_, dtype, kind_of(op), count, inputs, outputs);
    return;
  }
  const auto size = static_cast<std::int64_t>(dtype_bytes(dtype));
  const std::int64_t part = std::min(count, kPartBytes / size);
  auto* const blocks = static_cast<char*>(
      block(static_cast<std::size_t>(part * size) * inputs.size()));
  std::vector<const void*> copies;
  for (std::size_t k = 0; k < inputs.size(); ++k) {
    copies.push_back(blocks + static_cast<std::int64_t>(k) * part * size);
  }
  for (std::int64_t begin = 0; begin < count; begin += part) {
    const std::int64_t n = std::min(part, count - begin);
    const auto bytes = static_cast<std::size_t>(n * size);
    for (std::size_t k = 0; k < inputs.size(); ++k) {
      copy(const_cast<void*>(copies[k]),
           static_cast<const char*>(inputs[k]) + begin * size, bytes);
    }
    void* const result = const_cast<void*>(copies[0]);
    kernels::combine(kernels_, dtype, kind_of(op), n, copies, {result});
    for (void* output : outputs) {
      copy(static_cast<char*>(output) + begin * size, result, bytes);
    }
  }
}

void DeviceRunner::finish() {
  runtime_.synchronize_stream(stream_);
  scratch_.free_released();
}

void* DeviceRunner::block(std::size_t bytes) {
  if (bytes > block_bytes_) {
    if (block_ != nullptr) {
      finish();
      runtime_.free(block_);
      block_ = nullptr;
      block_bytes_ = 0;
    }
    block_ = runtime_.allocate(bytes);
    SB_CHECK(block_ != nullptr, "out of memory on cuda:", gpu_, ": asked for ",
             bytes, " bytes for a call between GPUs");
    block_bytes_ = bytes;
  }
  return block_;
}

}  // namespace shardbook::internal
