#pragma once

// Where the memory of a device comes from. Read by core/*.cpp only.

#include <cstddef>
#include <cstdint>
#include <memory>

namespace shardbook::internal {

class BlockUse;
class DeviceRuntime;

/// A piece of memory of the requested size.
struct Block {
  void* data = nullptr;
  /// CUDA: the streams that have been given work with it; otherwise null.
  BlockUse* use = nullptr;
};

/// Blocks of a device. Freed blocks are kept for the next request of their
/// size. The device calls this class under one lock.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  /// A kept block; `data` is null when there is none of this size.
  virtual Block take_kept(std::size_t bytes) = 0;
  /// A new block; `data` is null when there is no memory left.
  virtual Block take_new(std::size_t bytes) = 0;
  virtual void keep(const Block& block, std::size_t bytes) = 0;
  /// Gives the blocks that are kept, and that no graph uses, back to the system.
  /// Returns their bytes.
  virtual std::size_t release_kept() = 0;
};

/// The memory of the process, aligned to 64 bytes. The most recently kept block
/// comes first, here and in pinned memory.
std::unique_ptr<DeviceMemory> make_host_memory();
/// Host memory that copies to and from CUDA devices need not stage.
std::unique_ptr<DeviceMemory> make_pinned_memory(DeviceRuntime& runtime,
                                                 int index);

}  // namespace shardbook::internal
