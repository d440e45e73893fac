#include "core/kernels/kernel_context.h"

#include <cstdlib>
#include <new>

#include "core/check.h"

namespace shardbook {

namespace {
constexpr std::size_t kAlignment = 64;
}  // namespace

KernelContext::KernelContext(ScratchProvider* scratch, DeviceType type)
    : device_type(type), scratch_(scratch) {}

KernelContext::~KernelContext() = default;

void* KernelContext::acquire_scratch(std::size_t bytes) {
  if (scratch_ != nullptr) return scratch_->acquire(bytes);
  SB_CHECK(device_type == DeviceType::kCpu,
           "kernels: a context on a GPU needs a provider of scratch memory");
  const std::size_t rounded =
      (bytes + kAlignment - 1) / kAlignment * kAlignment;
  void* pointer = std::aligned_alloc(kAlignment, rounded);
  SB_CHECK(pointer != nullptr, "kernels: no memory for ", bytes,
           " bytes of scratch");
  return pointer;
}

void KernelContext::release_scratch(void* pointer) noexcept {
  if (scratch_ != nullptr) {
    scratch_->release(pointer);
  } else {
    std::free(pointer);
  }
}

}  // namespace shardbook
