#include "core/internal/device_memory.h"

#include <cstdlib>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/internal/device_runtime.h"

namespace shardbook::internal {

namespace {

// Blocks that the host alone uses.
class HostMemory : public DeviceMemory {
 public:
  HostMemory(std::function<void*(std::size_t)> allocate,
             std::function<void(void*)> free)
      : allocate_(std::move(allocate)), free_(std::move(free)) {}
  ~HostMemory() override {
    try {
      release_kept();
    } catch (const Error&) {
      // The device failed; every wait for it has thrown the error.
    }
  }

  Block take_kept(std::size_t bytes) override {
    const auto found = kept_.find(bytes);
    if (found == kept_.end() || found->second.empty()) return {};
    void* data = found->second.back();
    found->second.pop_back();
    return {data, nullptr};
  }
  Block take_new(std::size_t bytes) override {
    return {allocate_(bytes), nullptr};
  }
  void keep(const Block& block, std::size_t bytes) override {
    kept_[bytes].push_back(block.data);
  }
  std::size_t release_kept() override {
    std::size_t bytes = 0;
    for (auto& [size, blocks] : kept_) {
      for (void* block : blocks) free_(block);
      bytes += size * blocks.size();
    }
    kept_.clear();
    return bytes;
  }

 private:
  const std::function<void*(std::size_t)> allocate_;
  const std::function<void(void*)> free_;
  std::map<std::size_t, std::vector<void*>> kept_;
};

}  // namespace

std::unique_ptr<DeviceMemory> make_host_memory() {
  constexpr std::size_t kAlignment = 64;
  return std::make_unique<HostMemory>(
      [](std::size_t bytes) { return std::aligned_alloc(kAlignment, bytes); },
      [](void* data) { std::free(data); });
}

std::unique_ptr<DeviceMemory> make_pinned_memory(DeviceRuntime& runtime,
                                                 int index) {
  return std::make_unique<HostMemory>(
      [&runtime, index](std::size_t bytes) {
        runtime.use(index);
        return runtime.allocate_pinned(bytes);
      },
      [&runtime, index](void* data) {
        runtime.use(index);
        runtime.free_pinned(data);
      });
}

}  // namespace shardbook::internal
