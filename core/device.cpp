#include "core/device.h"

#include <cstdlib>
#include <map>
#include <mutex>
#include <sstream>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/context.h"
#include "core/internal/kernel_orders.h"

namespace shardbook {
namespace {

constexpr std::int64_t kAlignment = 64;

// Blocks are rounded so that the next iteration's requests find the same
// sizes again: to 512 bytes below 1 MiB, to 64 KiB above.
std::int64_t block_bytes(std::int64_t bytes) {
  const std::int64_t unit = bytes < (1 << 20) ? 512 : (64 << 10);
  return (bytes + unit - 1) / unit * unit;
}

// Tensors may outlive the context of the thread that frees them.
void notify(const AllocationEvent& event) {
  if (RankContext* context = RankContext::installed()) {
    context->notify_allocation(event);
  }
}

}  // namespace

const char* memory_kind_name(MemoryKind kind) {
  constexpr std::array<const char*, kNumMemoryKinds> kNames = {
      "parameter",     "gradient", "optimizer_state", "activation",
      "communication", "input",    "workspace"};
  return kNames[static_cast<std::size_t>(kind)];
}

class Device::State {
 public:
  State(DeviceType type, int index, std::int64_t capacity)
      : type_(type), index_(index), capacity_(capacity) {}
  ~State() { release_cached(); }

  DeviceType type() const { return type_; }
  int index() const { return index_; }
  std::int64_t capacity() const { return capacity_; }
  std::string name() const {
    if (index_ < 0) return "host";
    return (type_ == DeviceType::kCpu ? "cpu:" : "meta:") +
           std::to_string(index_);
  }

  void* allocate(std::int64_t bytes, MemoryKind kind) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (capacity_ > 0 && stats_.current_total + bytes > capacity_) {
      SB_FAIL("out of memory on ", name(), ": asked for ", bytes,
              " bytes of kind ", memory_kind_name(kind), "; ", report());
    }
    void* data = type_ == DeviceType::kMeta ? nullptr : take_block(bytes);
    stats_.num_allocations += 1;
    book(kind, bytes);
    return data;
  }

  void free(void* data, std::int64_t bytes, MemoryKind kind) {
    std::lock_guard<std::mutex> lock(mutex_);
    book(kind, -bytes);
    if (data == nullptr) return;
    const std::int64_t size = block_bytes(bytes);
    cache_[size].push_back(data);
    stats_.cached += size;
  }

  void move_kind(std::int64_t bytes, MemoryKind from, MemoryKind to) {
    std::lock_guard<std::mutex> lock(mutex_);
    // Subtract first: the total must not show a peak that never was.
    book(from, -bytes);
    book(to, bytes);
  }

  MemoryStats stats() {
    std::lock_guard<std::mutex> lock(mutex_);
    return stats_;
  }

  void reset_peak() {
    std::lock_guard<std::mutex> lock(mutex_);
    stats_.peak_by_kind = stats_.current_by_kind;
    stats_.at_peak_by_kind = stats_.current_by_kind;
    stats_.peak_total = stats_.current_total;
  }

  void release_cached() {
    std::lock_guard<std::mutex> lock(mutex_);
    release_cached_blocks();
  }

  std::string locked_report() {
    std::lock_guard<std::mutex> lock(mutex_);
    return report();
  }

 private:
  void* take_block(std::int64_t bytes) {
    if (bytes == 0) return nullptr;
    const std::int64_t size = block_bytes(bytes);
    auto found = cache_.find(size);
    if (found != cache_.end() && !found->second.empty()) {
      void* data = found->second.back();
      found->second.pop_back();
      stats_.cached -= size;
      return data;
    }
    void* data = std::aligned_alloc(kAlignment, static_cast<std::size_t>(size));
    if (data == nullptr) {
      release_cached_blocks();
      data = std::aligned_alloc(kAlignment, static_cast<std::size_t>(size));
    }
    SB_CHECK(data != nullptr, "out of memory: the system has no ", size,
             " bytes for ", name(), "; ", report());
    return data;
  }

  void release_cached_blocks() {
    for (auto& [size, blocks] : cache_) {
      for (void* block : blocks) std::free(block);
    }
    cache_.clear();
    stats_.cached = 0;
  }

  void book(MemoryKind kind, std::int64_t bytes) {
    const auto k = static_cast<std::size_t>(kind);
    stats_.current_by_kind[k] += bytes;
    stats_.current_total += bytes;
    if (stats_.current_by_kind[k] > stats_.peak_by_kind[k]) {
      stats_.peak_by_kind[k] = stats_.current_by_kind[k];
    }
    if (stats_.current_total > stats_.peak_total) {
      stats_.peak_total = stats_.current_total;
      stats_.at_peak_by_kind = stats_.current_by_kind;
    }
  }

  std::string report() const {
    std::ostringstream out;
    out << stats_.current_total << " bytes in use on " << name() << " (";
    for (int k = 0; k < kNumMemoryKinds; ++k) {
      out << (k ? ", " : "") << memory_kind_name(static_cast<MemoryKind>(k))
          << " " << stats_.current_by_kind[static_cast<std::size_t>(k)];
    }
    out << ")";
    if (capacity_ > 0) out << ", capacity " << capacity_ << " bytes";
    return out.str();
  }

  const DeviceType type_;
  const int index_;
  const std::int64_t capacity_;
  std::mutex mutex_;
  MemoryStats stats_;
  std::map<std::int64_t, std::vector<void*>> cache_;
};

Device Device::cpu(int index, std::int64_t capacity_bytes) {
  return Device(
      std::make_shared<State>(DeviceType::kCpu, index, capacity_bytes));
}

Device Device::meta(int index, std::int64_t capacity_bytes) {
  return Device(
      std::make_shared<State>(DeviceType::kMeta, index, capacity_bytes));
}

DeviceType Device::type() const {
  SB_CHECK(defined(), "device: this handle names no device");
  return state_->type();
}
int Device::index() const { return state_->index(); }
std::string Device::name() const {
  return defined() ? state_->name() : "no device";
}
std::int64_t Device::capacity_bytes() const { return state_->capacity(); }
MemoryStats Device::memory() const { return state_->stats(); }
void Device::reset_peak_memory() { state_->reset_peak(); }
void Device::release_cached_memory() { state_->release_cached(); }
std::string Device::memory_report() const { return state_->locked_report(); }

Storage::Storage(const Device& device, std::int64_t bytes, MemoryKind kind)
    : device_(device), kind_(kind) {
  resize(bytes);
}

Storage::~Storage() {
  delete known_kernel_orders();
  if (bytes_ == 0) return;
  device_.state()->free(data_, bytes_, kind_);
  notify({device_, kind_, -bytes_});
}

void Storage::set_kind(MemoryKind kind) {
  if (kind == kind_) return;
  device_.state()->move_kind(bytes_, kind_, kind);
  notify({device_, kind_, -bytes_});
  notify({device_, kind, bytes_});
  kind_ = kind;
}

void Storage::resize(std::int64_t bytes) {
  if (bytes == bytes_) return;
  if (internal::KernelOrders* orders = known_kernel_orders()) orders->forget();
  if (bytes_ > 0) {
    device_.state()->free(std::exchange(data_, nullptr), bytes_, kind_);
    notify({device_, kind_, -bytes_});
    bytes_ = 0;
  }
  if (bytes > 0) {
    data_ = device_.state()->allocate(bytes, kind_);
    bytes_ = bytes;
    notify({device_, kind_, bytes});
  }
}

internal::KernelOrders& Storage::kernel_orders() {
  if (internal::KernelOrders* known = known_kernel_orders()) return *known;
  auto made = std::make_unique<internal::KernelOrders>();
  internal::KernelOrders* first = nullptr;
  // Another thread may have been faster.
  if (!kernel_orders_.compare_exchange_strong(first, made.get(),
                                              std::memory_order_acq_rel)) {
    return *first;
  }
  return *made.release();
}

}  // namespace shardbook
