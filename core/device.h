#pragma once

// Devices and their memory.
//
// A `Device` is a handle to one GPU, emulated or real: `cpu:i` has memory of the
// host, `cuda:i` of a GPU, and `meta:i` has shapes only. Each device owns a
// caching allocator that counts every byte by kind, and may have a capacity,
// beyond which it runs out of memory as a real one would:
//
//   Device gpu = Device::cpu(0, /*capacity_bytes=*/1 << 30);
//   Tensor x = Tensor::zeros({4, 8}, {DType::kF32, gpu});
//   gpu.memory().current(MemoryKind::kActivation);   // 128
//
// Handles may be copied and used from any thread. A device lives as long as
// the last handle or tensor on it.
//
// Each CUDA device that is made has streams of its own and its own part of the
// GPU's memory, so several ranks can share one GPU. Memory is reused in the
// order of streams, without waiting: core/internal/cuda_device.h.

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "core/device_type.h"

namespace shardbook {

namespace internal {
class BlockUse;
class DeviceRuntime;
class KernelOrders;
struct Block;
}  // namespace internal

class Device;
namespace internal {
Device make_cuda_device(DeviceRuntime& runtime, int index,
                        std::int64_t capacity_bytes);
Device make_pinned_host(const Device& gpu);
}  // namespace internal

/// What a piece of memory is for.
enum class MemoryKind {
  kParameter,
  kGradient,
  kOptimizerState,
  kActivation,
  kCommunication,
  kInput,
  kWorkspace
};
constexpr int kNumMemoryKinds = 7;
/// "parameter", "gradient", "optimizer_state", "activation", ...
const char* memory_kind_name(MemoryKind kind);

/// Bytes in use on one device, exactly as requested (without rounding).
struct MemoryStats {
  std::array<std::int64_t, kNumMemoryKinds> current_by_kind{};
  /// Each kind's own peak, whenever it occurred.
  std::array<std::int64_t, kNumMemoryKinds> peak_by_kind{};
  /// Each kind's largest value at its calls of `note_held`.
  std::array<std::int64_t, kNumMemoryKinds> held_by_kind{};
  /// What each kind held at the moment of `peak_total`.
  std::array<std::int64_t, kNumMemoryKinds> at_peak_by_kind{};
  std::int64_t current_total = 0;
  std::int64_t peak_total = 0;
  /// The largest sum of all kinds but workspace, whose size depends on the
  /// processor.
  std::int64_t peak_of_tensors = 0;
  /// Bytes taken from the system and kept for the next request, or for the
  /// graphs that use it (core/device_graph.h).
  std::int64_t cached = 0;
  std::int64_t num_allocations = 0;

  std::int64_t current(MemoryKind kind) const {
    return current_by_kind[static_cast<std::size_t>(kind)];
  }
  std::int64_t peak(MemoryKind kind) const {
    return peak_by_kind[static_cast<std::size_t>(kind)];
  }
  std::int64_t held(MemoryKind kind) const {
    return held_by_kind[static_cast<std::size_t>(kind)];
  }
};

class Device {
 public:
  /// No device; means "the device of the current RankContext".
  Device() = default;

  /// A new emulated device with its own memory. `capacity_bytes` 0: no limit.
  static Device cpu(int index = 0, std::int64_t capacity_bytes = 0);
  /// A new device whose tensors have shapes and no storage. Bytes are counted.
  static Device meta(int index = 0, std::int64_t capacity_bytes = 0);
  /// A slice of the machine's GPU `index`. With a capacity it holds no more than
  /// that, cached memory included. Throws Error where there is no such GPU, or
  /// no CUDA at all.
  static Device cuda(int index = 0, std::int64_t capacity_bytes = 0);

  bool defined() const { return state_ != nullptr; }
  DeviceType type() const;
  bool is_meta() const { return type() == DeviceType::kMeta; }
  bool is_cuda() const { return type() == DeviceType::kCuda; }
  int index() const;
  /// "cpu:0", "cuda:1", "meta:3".
  std::string name() const;
  std::int64_t capacity_bytes() const;

  MemoryStats memory() const;
  /// Records for `held_by_kind` the bytes of this kind in use now, at a moment
  /// that the program chooses, such as the end of a forward.
  void note_held(MemoryKind kind) const;
  /// Peaks restart from the current use, and `held_by_kind` from 0.
  void reset_peak_memory();
  /// Gives cached blocks back to the system, except those of graphs.
  void release_cached_memory();

  /// True for two handles to one device, not for two devices of one name.
  bool operator==(const Device& other) const { return state_ == other.state_; }
  bool operator!=(const Device& other) const { return state_ != other.state_; }

  class State;
  State* state() const { return state_.get(); }

 private:
  friend Device internal::make_cuda_device(internal::DeviceRuntime& runtime,
                                           int index,
                                           std::int64_t capacity_bytes);
  friend Device internal::make_pinned_host(const Device& gpu);
  explicit Device(std::shared_ptr<State> state) : state_(std::move(state)) {}
  std::shared_ptr<State> state_;
};

/// One allocation on a device; returns its bytes when destroyed. Memory is
/// aligned to 64 bytes and not initialised; null on meta devices and for 0
/// bytes.
class Storage {
 public:
  /// Throws Error with the ledger when the device's capacity is exceeded.
  Storage(const Device& device, std::int64_t bytes, MemoryKind kind);
  ~Storage();
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;

  /// The address, for work that is issued to the current stream next. On CUDA,
  /// the stream first waits for other streams' work with this memory from
  /// before it was allocated.
  void* data() const {
    if (use_ != nullptr) use_on_current_stream();
    return data_;
  }
  /// The same for another stream: one of a process group.
  void use_on(int stream) const;
  std::int64_t bytes() const { return bytes_; }
  MemoryKind kind() const { return kind_; }
  const Device& device() const { return device_; }
  /// Books the bytes under another kind; the memory stays where it is.
  void set_kind(MemoryKind kind);
  /// Frees the bytes (0) or allocates them again; contents are lost. Views keep
  /// their shape and must not be read while the storage is empty.
  void resize(std::int64_t bytes);
  /// Exchanges the memory of two storages of one size on one device; each keeps
  /// its kind.
  void swap_memory(Storage& other);

  /// The kernels' own orders of these values, created at the first call; see
  /// core/internal/kernel_orders.h.
  internal::KernelOrders& kernel_orders();
  /// The same, or null before the first call.
  internal::KernelOrders* known_kernel_orders() const {
    return kernel_orders_.load(std::memory_order_acquire);
  }

 private:
  internal::Block block() const;
  void use_on_current_stream() const;

  Device device_;
  std::int64_t bytes_ = 0;
  MemoryKind kind_;
  void* data_ = nullptr;
  internal::BlockUse* use_ = nullptr;  ///< on CUDA
  std::atomic<internal::KernelOrders*> kernel_orders_{nullptr};
};

}  // namespace shardbook
