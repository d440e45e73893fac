#include "core/device.h"

#include <algorithm>
#include <bit>
#include <mutex>
#include <sstream>
#include <utility>

#include "core/check.h"
#include "core/context.h"
#include "core/internal/cuda_device.h"
#include "core/internal/device_memory.h"
#include "core/internal/device_runtime.h"
#include "core/internal/kernel_orders.h"

namespace shardbook {
namespace {

using internal::Block;
using internal::CudaDevice;
using internal::DeviceMemory;

// Blocks are rounded so that later requests find the same sizes again: to 512
// bytes below 1 MiB, to 64 KiB above. On the host, where untouched pages cost
// nothing, to eight sizes per power of two, because each expert's number of
// tokens differs from step to step.
std::int64_t block_bytes(DeviceType type, std::int64_t bytes) {
  std::int64_t unit = bytes < (1 << 20) ? 512 : (64 << 10);
  if (type == DeviceType::kCpu) {
    const auto power = std::bit_floor(static_cast<std::uint64_t>(bytes));
    unit = std::max<std::int64_t>(512, static_cast<std::int64_t>(power) / 8);
  }
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
  /// `memory` is null on meta devices; `cuda` is null except on CUDA.
  State(DeviceType type, int index, std::int64_t capacity,
        std::unique_ptr<DeviceMemory> memory,
        std::unique_ptr<CudaDevice> cuda = nullptr)
      : type(type),
        index(index),
        capacity(capacity),
        cuda(std::move(cuda)),
        memory_(std::move(memory)) {}

  const DeviceType type;
  const int index;
  const std::int64_t capacity;
  const std::unique_ptr<CudaDevice> cuda;
  Device gpu;  ///< pinned memory: the GPU that copies to and from it

  std::string name() const {
    if (index < 0) return "host";
    const char* kind = type == DeviceType::kCpu    ? "cpu"
                       : type == DeviceType::kMeta ? "meta"
                                                   : "cuda";
    return kind + (":" + std::to_string(index));
  }

  Block allocate(std::int64_t bytes, MemoryKind kind) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (capacity > 0 && stats_.current_total + bytes > capacity) {
      SB_FAIL("out of memory on ", name(), ": asked for ", bytes,
              " bytes of kind ", memory_kind_name(kind), "; ", report());
    }
    const Block block = memory_ == nullptr ? Block{} : take_block(bytes);
    stats_.num_allocations += 1;
    book(kind, bytes);
    return block;
  }

  void free(const Block& block, std::int64_t bytes, MemoryKind kind) {
    std::lock_guard<std::mutex> lock(mutex_);
    book(kind, -bytes);
    if (block.data == nullptr) return;
    const std::int64_t size = block_bytes(type, bytes);
    memory_->keep(block, static_cast<std::size_t>(size));
    stats_.cached += size;
    held_ -= size;
  }

  void move_kind(std::int64_t bytes, MemoryKind from, MemoryKind to) {
    std::lock_guard<std::mutex> lock(mutex_);
    // Subtract first: the total must not show a peak that never occurred.
    book(from, -bytes);
    book(to, bytes);
  }

  MemoryStats stats() {
    std::lock_guard<std::mutex> lock(mutex_);
    return stats_;
  }

  void note_held(MemoryKind kind) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto k = static_cast<std::size_t>(kind);
    stats_.held_by_kind[k] =
        std::max(stats_.held_by_kind[k], stats_.current_by_kind[k]);
  }

  void reset_peak() {
    std::lock_guard<std::mutex> lock(mutex_);
    stats_.held_by_kind = {};
    stats_.peak_by_kind = stats_.current_by_kind;
    stats_.at_peak_by_kind = stats_.current_by_kind;
    stats_.peak_total = stats_.current_total;
    stats_.peak_of_tensors = tensor_bytes();
  }

  void release_cached() {
    std::lock_guard<std::mutex> lock(mutex_);
    release_cached_blocks();
  }

 private:
  Block take_block(std::int64_t bytes) {
    if (bytes == 0) return {};
    const std::int64_t size = block_bytes(type, bytes);
    const auto wanted = static_cast<std::size_t>(size);
    Block block = memory_->take_kept(wanted);
    if (block.data != nullptr) {
      stats_.cached -= size;
    } else {
      // Ranks that share a GPU have a slice of its memory each.
      const std::int64_t holds = held_ + stats_.cached + size;
      if (cuda != nullptr && capacity > 0 && holds > capacity) {
        release_cached_blocks();
        SB_CHECK(stats_.cached == 0 || held_ + stats_.cached + size <= capacity,
                 "out of memory on ", name(), ": asked for ", bytes,
                 " bytes; graphs keep ", stats_.cached, " bytes; ", report());
      }
      block = memory_->take_new(wanted);
      if (block.data == nullptr) {
        release_cached_blocks();
        block = memory_->take_new(wanted);
      }
    }
    SB_CHECK(block.data != nullptr, "out of memory: the system has no ", size,
             " bytes for ", name(), "; ", report());
    held_ += size;
    return block;
  }

  void release_cached_blocks() {
    if (memory_ == nullptr) return;
    stats_.cached -= static_cast<std::int64_t>(memory_->release_kept());
  }

  std::int64_t tensor_bytes() const {
    return stats_.current_total - stats_.current(MemoryKind::kWorkspace);
  }

  void book(MemoryKind kind, std::int64_t bytes) {
    const auto k = static_cast<std::size_t>(kind);
    stats_.current_by_kind[k] += bytes;
    stats_.current_total += bytes;
    stats_.peak_by_kind[k] =
        std::max(stats_.peak_by_kind[k], stats_.current_by_kind[k]);
    stats_.peak_of_tensors = std::max(stats_.peak_of_tensors, tensor_bytes());
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
    if (capacity > 0) out << ", capacity " << capacity << " bytes";
    return out.str();
  }

  std::mutex mutex_;
  MemoryStats stats_;
  std::int64_t held_ = 0;  ///< bytes of blocks in use
  // Blocks are freed before `cuda`, whose streams used them.
  const std::unique_ptr<DeviceMemory> memory_;
};

Device Device::cpu(int index, std::int64_t capacity_bytes) {
  return Device(std::make_shared<State>(DeviceType::kCpu, index, capacity_bytes,
                                        internal::make_host_memory()));
}

Device Device::meta(int index, std::int64_t capacity_bytes) {
  return Device(std::make_shared<State>(DeviceType::kMeta, index,
                                        capacity_bytes, nullptr));
}

Device Device::cuda(int index, std::int64_t capacity_bytes) {
  return internal::make_cuda_device(internal::cuda_runtime(), index,
                                    capacity_bytes);
}

namespace internal {

Device make_cuda_device(DeviceRuntime& runtime, int index,
                        std::int64_t capacity_bytes) {
  SB_CHECK(index >= 0 && index < runtime.count(), "cuda:", index,
           ": this machine has ", runtime.count(),
           " GPUs, cuda:0 to cuda:", runtime.count() - 1);
  auto cuda = std::make_unique<CudaDevice>(runtime, index);
  auto memory = cuda->make_memory();
  return Device(
      std::make_shared<Device::State>(DeviceType::kCuda, index, capacity_bytes,
                                      std::move(memory), std::move(cuda)));
}

Device make_pinned_host(const Device& gpu) {
  CudaDevice& cuda = cuda_device(gpu);
  auto state = std::make_shared<Device::State>(
      DeviceType::kCpu, -1, 0,
      make_pinned_memory(cuda.runtime(), cuda.index()));
  state->gpu = gpu;
  return Device(std::move(state));
}

Device gpu_of(const Device& device) {
  return device.is_cuda() ? device : device.state()->gpu;
}

CudaDevice& cuda_device(const Device& device) {
  CudaDevice* cuda = device.state()->cuda.get();
  SB_CHECK(cuda != nullptr, device.name(), " is no CUDA device");
  return *cuda;
}

}  // namespace internal

DeviceType Device::type() const {
  SB_CHECK(defined(), "device: this handle names no device");
  return state_->type;
}
int Device::index() const { return state_->index; }
std::string Device::name() const {
  return defined() ? state_->name() : "no device";
}
std::int64_t Device::capacity_bytes() const { return state_->capacity; }
MemoryStats Device::memory() const { return state_->stats(); }
void Device::note_held(MemoryKind kind) const { state_->note_held(kind); }
void Device::reset_peak_memory() { state_->reset_peak(); }
void Device::release_cached_memory() { state_->release_cached(); }

Storage::Storage(const Device& device, std::int64_t bytes, MemoryKind kind)
    : device_(device), kind_(kind) {
  resize(bytes);
}

Storage::~Storage() {
  delete known_kernel_orders();
  if (bytes_ == 0) return;
  device_.state()->free(block(), bytes_, kind_);
  notify({device_, kind_, -bytes_});
}

internal::Block Storage::block() const { return {data_, use_}; }

void Storage::use_on(int stream) const {
  if (use_ != nullptr) use_->begin(stream);
}

void Storage::use_on_current_stream() const {
  use_on(RankContext::current().stream);
}

void Storage::swap_memory(Storage& other) {
  std::swap(data_, other.data_);
  std::swap(use_, other.use_);
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
    device_.state()->free(block(), bytes_, kind_);
    data_ = nullptr, use_ = nullptr;
    notify({device_, kind_, -bytes_});
    bytes_ = 0;
  }
  if (bytes > 0) {
    const Block block = device_.state()->allocate(bytes, kind_);
    data_ = block.data, use_ = block.use;
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
