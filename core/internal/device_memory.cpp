#include "core/internal/device_memory.h"

#include <cstdlib>

#include "core/check.h"
#include "core/internal/device_runtime.h"

namespace shardbook::internal {

Block HostMemory::take_kept(std::size_t bytes) {
  const auto found = kept_.find(bytes);
  if (found == kept_.end() || found->second.empty()) return {};
  void* data = found->second.back();
  found->second.pop_back();
  return {data, nullptr};
}

Block HostMemory::take_new(std::size_t bytes) {
  return {allocate(bytes), nullptr};
}

void HostMemory::keep(const Block& block, std::size_t bytes) {
  kept_[bytes].push_back(block.data);
}

std::size_t HostMemory::release_kept() {
  std::size_t bytes = 0;
  for (auto& [size, blocks] : kept_) {
    for (void* block : blocks) free(block);
    bytes += size * blocks.size();
  }
  kept_.clear();
  return bytes;
}

namespace {

class PlainMemory : public HostMemory {
 public:
  ~PlainMemory() override { release_kept(); }

 private:
  void* allocate(std::size_t bytes) override {
    constexpr std::size_t kAlignment = 64;
    return std::aligned_alloc(kAlignment, bytes);
  }
  void free(void* data) override { std::free(data); }
};

class PinnedMemory : public HostMemory {
 public:
  PinnedMemory(DeviceRuntime& runtime, int index)
      : runtime_(runtime), index_(index) {}
  ~PinnedMemory() override {
    try {
      release_kept();
    } catch (const Error&) {
      // The device failed; every wait for it has thrown the error.
    }
  }

 private:
  void* allocate(std::size_t bytes) override {
    runtime_.use(index_);
    return runtime_.allocate_pinned(bytes);
  }
  void free(void* data) override {
    runtime_.use(index_);
    runtime_.free_pinned(data);
  }

  DeviceRuntime& runtime_;
  const int index_;
};

}  // namespace

std::unique_ptr<DeviceMemory> make_host_memory() {
  return std::make_unique<PlainMemory>();
}

std::unique_ptr<DeviceMemory> make_pinned_memory(DeviceRuntime& runtime,
                                                 int index) {
  return std::make_unique<PinnedMemory>(runtime, index);
}

}  // namespace shardbook::internal
