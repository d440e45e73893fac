#include "tests/cuda/emulator/streams.h"

#include <algorithm>
#include <cstdlib>

#include "tests/cuda/emulator/block.h"
#include "tests/cuda/emulator/capture.h"
#include "tests/cuda/emulator/device_memory.h"
#include "tests/cuda/emulator/emulator.h"
#include "tests/cuda/emulator/order.h"

namespace emulator {

Runtime& Runtime::instance() {
  // Never destroyed: streams may be waited for while the process ends.
  static Runtime& runtime = *[] {
    auto* made = new Runtime;
    const char* count = std::getenv("SHARDBOOK_EMULATED_GPUS");
    if (count != nullptr) made->num_devices = std::atoi(count);
    made->device_bytes = std::size_t{16} << 30;
    install_fault_handler();
    return made;
  }();
  return runtime;
}

std::shared_ptr<Stream> Runtime::make_stream(bool is_blocking) {
  auto stream = std::make_shared<Stream>();
  stream->device = current_device();
  stream->number = ++next_stream;
  stream->is_blocking = is_blocking;
  working.push_back(stream);
  return stream;
}

std::shared_ptr<Stream> Runtime::find(cudaStream_t handle) {
  if (handle == nullptr) {
    auto& stream = null_streams[current_device()];
    if (stream == nullptr) stream = make_stream(true);
    return stream;
  }
  const auto found = streams.find(reinterpret_cast<Stream*>(handle));
  return found == streams.end() ? nullptr : found->second;
}

cudaError_t Runtime::add(const std::shared_ptr<Stream>& stream, Work work,
                         Lock& lock) {
  if (Capture* const capture = stream->capture.get()) {
    if (!capture->why_void.empty()) {
      return report(cudaErrorStreamCaptureInvalidated, capture->why_void);
    }
    capture->add(*stream, std::move(work));
    return cudaSuccess;
  }
  const auto null_stream = null_streams.find(stream->device);
  const bool is_null =
      null_stream != null_streams.end() && null_stream->second == stream;
  // The null stream comes after all that blocking streams have to do, and they
  // come after it.
  if (is_null) advance_device(stream->device, lock, /*blocking_only=*/true);
  stream->queue.push_back(std::move(work));
  ++stream->issued;
  if (is_null) advance(stream, stream->issued, lock);
  changed.notify_all();
  return cudaSuccess;
}

bool Runtime::step(Stream& stream) {
  if (stream.queue.empty()) return false;
  Work& work = stream.queue.front();
  if (work.other != nullptr) {
    if (work.other->done < work.position) return step(*work.other);
  } else {
    try {
      if (!work.poll()) return false;
    } catch (const std::exception& error) {
      failures.emplace(stream.device, work.name + ": " + error.what());
    }
  }
  stream.queue.pop_front();
  ++stream.done;
  return true;
}

bool Runtime::step_any(const Stream* except) {
  const std::size_t n = working.size();
  const std::size_t first = seed() > 1 && n > 0 ? random_below(n) : 0;
  bool has_moved = false;
  for (std::size_t i = 0; i < n && !has_moved; ++i) {
    const auto stream = working[(first + i) % n];
    has_moved = stream.get() != except && step(*stream);
  }
  // Destroyed streams are forgotten when they have done their work.
  std::erase_if(working, [this](const std::shared_ptr<Stream>& stream) {
    return stream->queue.empty() && streams.count(stream.get()) == 0;
  });
  return has_moved;
}

void Runtime::advance(const std::shared_ptr<Stream>& stream,
                      std::uint64_t position, Lock& lock) {
  while (stream->done < position) {
    bool has_moved = false;
    {
      const OpenDeviceMemory opened;
      if (seed() > 1 && random_below(4) == 0) step_any(stream.get());
      has_moved = step(*stream) || step_any(stream.get());
    }
    if (has_moved) {
      changed.notify_all();
    } else {
      changed.wait(lock);
    }
  }
}

void Runtime::advance_device(int device, Lock& lock, bool blocking_only) {
  const auto all = working;
  for (const auto& stream : all) {
    if (stream->device != device) continue;
    if (blocking_only && !stream->is_blocking) continue;
    advance(stream, stream->issued, lock);
  }
}

bool Runtime::try_advance(Stream& stream, std::uint64_t position) {
  const OpenDeviceMemory opened;
  while (stream.done < position) {
    if (!step(stream)) return false;
    changed.notify_all();
  }
  return true;
}

void enqueue(cudaStream_t handle, std::string name,
             std::function<bool()> poll) {
  Runtime& runtime = Runtime::instance();
  Runtime::Lock lock(runtime.mutex);
  const auto stream = runtime.find(handle);
  if (stream == nullptr) {
    report(cudaErrorInvalidResourceHandle, name + ": the stream is gone");
    return;
  }
  runtime.add(stream, {std::move(name), std::move(poll)}, lock);
}

void wake() {
  Runtime& runtime = Runtime::instance();
  const Runtime::Lock lock(runtime.mutex);
  runtime.changed.notify_all();
}

void wake_from_poll() { Runtime::instance().changed.notify_all(); }

void launch_grid(cudaStream_t handle, Grid grid) {
  Runtime& runtime = Runtime::instance();
  Runtime::Lock lock(runtime.mutex);
  if (planted(runtime, "launch") != cudaSuccess) return;
  const auto stream = runtime.find(handle);
  if (stream == nullptr) {
    report(cudaErrorInvalidResourceHandle, grid.name + ": the stream is gone");
    return;
  }
  if (stream->device != current_device()) {
    report(cudaErrorInvalidResourceHandle,
           grid.name + ": the stream is of device " +
               std::to_string(stream->device) + ", the thread uses device " +
               std::to_string(current_device()));
    return;
  }
  const std::uint64_t threads =
      std::uint64_t{grid.block.x} * grid.block.y * grid.block.z;
  if (threads == 0 || threads > kMaxThreads || grid.block.z > 64 ||
      grid.grid.x == 0 || grid.grid.x > 0x7fffffffu || grid.grid.y == 0 ||
      grid.grid.y > 65535 || grid.grid.z == 0 || grid.grid.z > 65535) {
    report(cudaErrorInvalidConfiguration);
    return;
  }
  const int device = stream->device;
  const auto shared = std::make_shared<Grid>(std::move(grid));
  runtime.add(stream,
              {shared->name,
               [&runtime, shared, device] {
                 const std::string failure = run_grid(*shared);
                 if (!failure.empty()) {
                   runtime.failures.emplace(device, failure);
                 }
                 return true;
               }},
              lock);
}

void reset() {
  Runtime& runtime = Runtime::instance();
  Runtime::Lock lock(runtime.mutex);
  runtime.planted.clear();
  for (int device = 0; device < runtime.num_devices; ++device) {
    runtime.advance_device(device, lock);
  }
  runtime.failures.clear();
  report(cudaSuccess);
}

void fail_call(const std::string& function, int nth, cudaError_t error) {
  Runtime& runtime = Runtime::instance();
  const Runtime::Lock lock(runtime.mutex);
  runtime.planted[function] = {nth, error};
}

int num_calls(const std::string& function) {
  Runtime& runtime = Runtime::instance();
  const Runtime::Lock lock(runtime.mutex);
  return runtime.num_calls[function];
}

void set_device_count(int count) {
  Runtime& runtime = Runtime::instance();
  const Runtime::Lock lock(runtime.mutex);
  runtime.num_devices = count;
}

void set_device_memory(std::size_t bytes) {
  Runtime& runtime = Runtime::instance();
  const Runtime::Lock lock(runtime.mutex);
  runtime.device_bytes = bytes;
}

}  // namespace emulator
