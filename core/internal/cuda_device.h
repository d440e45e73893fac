#pragma once

// One rank's part of a GPU: streams of its own, and memory whose reuse follows
// their order. Read by core/ and comm/ only.
//
// A program gives work to a stream and frees memory that the work still uses.
// The allocator never waits for the work on the host. It keeps, with each block
// of memory, the streams that were given work with it, and it orders streams:
//
//   compute  | kernel on x |        | kernel on y |
//   host     '- free x, allocate y at x's address -'
//   copy                   '- held: y was x, and compute may still use it
//
// Rule: a stream's first work with a block runs after all work with this block
// that other streams were given before it was freed. One stream alone keeps its
// own order, so a program with one stream records and waits for nothing.
//
// Proof. An operation asks a storage for its address (Storage::data) on the
// stream that it is issued to, so `BlockUse` knows every stream U that uses the
// block between an allocation and the free. The free records an event on each
// U, after all of U's work with the block. A stream V that asks for the address
// in the block's next life is held on those events first, except on its own.
// All later work of V runs after them. If the next life ends before anyone asks
// for the address, the events stay with the block.
//
// A graph (core/device_graph.h) uses the same addresses at each launch. So each
// block whose address is asked for while a graph is recorded belongs to that
// graph: when it is freed, only a recording with the same GraphBlocks gets it.

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "core/device.h"
#include "core/internal/device_memory.h"
#include "core/internal/device_runtime.h"

namespace shardbook::internal {

/// Stream numbers are below this: core/stream.h's come first, the others are
/// for process groups.
constexpr int kMaxStreams = 64;

class BlockUse;
class CudaDevice;

/// The blocks of one or several graphs that are launched in turn on a stream.
class GraphBlocks {
 public:
  GraphBlocks(const Device& device, int stream)
      : device_(device), stream_(stream) {}
  /// Makes the blocks ordinary ones, with the stream as their last user.
  ~GraphBlocks();
  GraphBlocks(const GraphBlocks&) = delete;
  GraphBlocks& operator=(const GraphBlocks&) = delete;

  const Device& device() const { return device_; }
  int stream() const { return stream_; }

 private:
  friend class CudaDevice;
  const Device device_;
  const int stream_;
  std::vector<BlockUse*> uses_;  // guarded by CudaDevice::uses_
};

/// Which streams use one block: a set of bits for the block's current life, and
/// events to wait for from the life before it.
class BlockUse {
 public:
  explicit BlockUse(CudaDevice& device) : device_(device) {}

  /// Stream `number` is about to be given work with the block.
  void begin(int number);

 private:
  friend class CudaDevice;
  friend class CudaMemory;
  friend class GraphBlocks;
  struct Earlier {
    int stream;
    void* event;  ///< null: will be recorded at the wait
  };

  CudaDevice& device_;
  std::atomic<std::uint64_t> streams_{0};
  std::vector<const GraphBlocks*> graphs_;  ///< graphs that own the block
  std::vector<Earlier> earlier_;
};

/// Safe to use from several threads. Every call makes `index` the calling
/// thread's CUDA device.
class CudaDevice {
 public:
  CudaDevice(DeviceRuntime& runtime, int index)
      : runtime_(runtime), index_(index) {}
  /// Waits for all work of its streams.
  ~CudaDevice();
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  DeviceRuntime& runtime() { return runtime_; }
  int index() const { return index_; }
  /// The cudaStream_t of a stream number; made at the first call.
  void* stream(int number);
  /// The host waits for one stream, or for all of this rank's.
  void synchronize(int stream);
  void synchronize();
  /// From now on, `stream` of this device runs after the work that
  /// `other_stream` of `other` has been given so far.
  void hold(int stream, CudaDevice& other, int other_stream);

  /// Records the blocks' stream; others refuse work. Only one host thread may
  /// use the device until the end, which returns the cudaGraphExec_t.
  void begin_recording(GraphBlocks& blocks);
  void* end_recording();
  void drop_recording() noexcept;
  bool is_recording() const { return recording_ != nullptr; }
  /// Throws Error with the reason while a graph is recorded.
  void refuse_recording(const char* why) const;

  std::unique_ptr<DeviceMemory> make_memory();

 private:
  friend class BlockUse;
  friend class GraphBlocks;
  friend class CudaMemory;
  void begin(BlockUse& use, int number);
  void adopt(BlockUse& use, GraphBlocks& graph);
  void end(BlockUse& use);
  void forget_earlier(BlockUse& use);
  void* record(int stream);

  DeviceRuntime& runtime_;
  const int index_;
  std::array<std::atomic<void*>, kMaxStreams> streams_{};
  std::atomic<int> num_streams_{0};
  std::mutex making_streams_;
  std::mutex uses_;  ///< guards earlier_ and graphs_ of BlockUse, and events_
  std::vector<void*> events_;
  std::atomic<GraphBlocks*> recording_{nullptr};
};

/// The rank's part of a CUDA device's GPU.
CudaDevice& cuda_device(const Device& device);
/// Throws Error, which names the operation, while a graph of `device` is recorded.
void refuse_recording(const Device& device, const char* op, const char* why);

/// Device::cuda on another runtime: for tests.
Device make_cuda_device(DeviceRuntime& runtime, int index,
                        std::int64_t capacity_bytes);
/// `device` if it is a GPU, the rank's GPU if it is a rank's pinned memory,
/// otherwise undefined.
Device gpu_of(const Device& device);
/// Pinned memory of the host, for a rank on `gpu`: a device named "host".
Device make_pinned_host(const Device& gpu);

}  // namespace shardbook::internal
