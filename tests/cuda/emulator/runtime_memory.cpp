// Memory and copies.

#include <cstring>
#include <sstream>

#include "tests/cuda/emulator/capture.h"
#include "tests/cuda/emulator/device_memory.h"
#include "tests/cuda/emulator/streams.h"

using emulator::Allocation;
using emulator::kHost;
using emulator::report;
using emulator::Runtime;
using emulator::Work;

namespace {

// Where `bytes` bytes lie: pageable memory has no allocation here.
struct Range {
  const char* begin;
  std::size_t bytes;
  const Allocation* allocation;

  Range(const void* pointer, std::size_t n)
      : begin(static_cast<const char*>(pointer)),
        bytes(n),
        allocation(emulator::find_allocation(pointer)) {}
  bool is_device() const {
    return allocation != nullptr && allocation->device != kHost;
  }
  bool is_pageable() const { return allocation == nullptr; }
  // What does not fit, or nothing.
  std::string problem() const {
    if (allocation == nullptr) {
      const std::string where = emulator::describe_address(begin);
      // Freed, or beside an allocation.
      return where.find("no allocation") == std::string::npos ? where : "";
    }
    const std::size_t left =
        static_cast<std::size_t>(allocation->begin + allocation->bytes - begin);
    if (bytes <= left) return "";
    return "of " + std::to_string(bytes) + " bytes, " +
           emulator::describe_address(begin);
  }
};

cudaError_t enqueue_copy(const char* function, void* to, const void* from,
                         std::size_t bytes, cudaMemcpyKind kind,
                         cudaStream_t handle, Runtime& runtime,
                         Runtime::Lock& lock) {
  const auto stream = runtime.find(handle);
  if (stream == nullptr) {
    return report(cudaErrorInvalidResourceHandle,
                  std::string(function) + ": the stream is gone");
  }
  if (bytes == 0) return cudaSuccess;
  const Range source(from, bytes), target(to, bytes);
  for (const Range* range : {&source, &target}) {
    const std::string problem = range->problem();
    if (problem.empty()) continue;
    return report(cudaErrorInvalidValue,
                  std::string(function) + ": " +
                      (range == &source ? "from" : "to") + " memory " +
                      problem);
  }
  const bool from_device =
      kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  const bool to_device =
      kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  if (kind != cudaMemcpyDefault &&
      (from_device != source.is_device() || to_device != target.is_device())) {
    return report(cudaErrorInvalidValue,
                  std::string(function) +
                      ": the pointers do not lie where the kind of copy says");
  }
  if (stream->capture != nullptr &&
      (source.is_pageable() || target.is_pageable())) {
    return emulator::refuse(*stream->capture,
                            "cudaMemcpyAsync of pageable memory");
  }
  Work work;
  work.name = function;
  if (source.is_pageable() && target.is_device()) {
    // CUDA takes what is in pageable memory at once.
    work.poll = [to, kept = std::string(source.begin, bytes)] {
      std::memcpy(to, kept.data(), kept.size());
      return true;
    };
  } else {
    work.poll = [to, from, bytes] {
      std::memmove(to, from, bytes);
      return true;
    };
    const Range& host = source.is_device() ? target : source;
    work.host = host.begin, work.host_bytes = bytes;
  }
  return runtime.add(stream, std::move(work), lock);
}

}  // namespace

cudaError_t cudaMalloc(void** pointer, std::size_t bytes) {
  EMULATOR_ENTER_UNSAFE();
  const int device = emulator::current_device();
  *pointer = nullptr;
  if (bytes == 0) return cudaSuccess;
  if (emulator::allocated_bytes(device) + bytes > runtime.device_bytes) {
    return report(cudaErrorMemoryAllocation);
  }
  *pointer = emulator::allocate(device, bytes);
  return *pointer == nullptr ? report(cudaErrorMemoryAllocation) : cudaSuccess;
}

cudaError_t cudaFree(void* pointer) {
  EMULATOR_ENTER_UNSAFE();
  if (pointer == nullptr) return cudaSuccess;
  const Allocation* allocation = emulator::find_allocation(pointer);
  // The call waits for the device.
  if (allocation != nullptr && allocation->device != kHost) {
    runtime.advance_device(allocation->device, lock);
  }
  const std::string problem = emulator::release(pointer, 0);
  return problem.empty()
             ? cudaSuccess
             : report(cudaErrorInvalidValue, "cudaFree: " + problem);
}

cudaError_t cudaHostAlloc(void** pointer, std::size_t bytes, unsigned) {
  EMULATOR_ENTER_UNSAFE();
  *pointer = bytes == 0 ? nullptr : emulator::allocate(kHost, bytes);
  return bytes > 0 && *pointer == nullptr ? report(cudaErrorMemoryAllocation)
                                          : cudaSuccess;
}

cudaError_t cudaFreeHost(void* pointer) {
  EMULATOR_ENTER_UNSAFE();
  if (pointer == nullptr) return cudaSuccess;
  const Range range(pointer, 1);
  for (const auto& stream : runtime.working) {
    for (const Work& work : stream->queue) {
      if (range.allocation == nullptr || work.host < range.begin ||
          work.host >= range.begin + range.allocation->bytes) {
        continue;
      }
      return report(cudaErrorInvalidValue,
                    "cudaFreeHost: " + work.name + " of " +
                        std::to_string(work.host_bytes) + " bytes on stream " +
                        std::to_string(stream->number) + " still uses it");
    }
  }
  const std::string problem = emulator::release(pointer, kHost);
  return problem.empty()
             ? cudaSuccess
             : report(cudaErrorInvalidValue, "cudaFreeHost: " + problem);
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes,
                            cudaMemcpyKind kind, cudaStream_t stream) {
  EMULATOR_ENTER();
  return enqueue_copy(__func__, to, from, bytes, kind, stream, runtime, lock);
}

cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes,
                       cudaMemcpyKind kind) {
  EMULATOR_ENTER_UNSAFE();
  const cudaError_t error =
      enqueue_copy(__func__, to, from, bytes, kind, nullptr, runtime, lock);
  if (error != cudaSuccess) return error;
  return emulator::report_failure(runtime, emulator::current_device());
}

cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes,
                            cudaStream_t handle) {
  EMULATOR_ENTER();
  const auto stream = runtime.find(handle);
  if (stream == nullptr) return report(cudaErrorInvalidResourceHandle);
  if (bytes == 0) return cudaSuccess;
  const Range target(to, bytes);
  if (target.is_pageable() || !target.problem().empty()) {
    return report(
        cudaErrorInvalidValue,
        std::string(__func__) + ": memory " +
            (target.problem().empty() ? "of the host" : target.problem()));
  }
  return runtime.add(stream,
                     {__func__,
                      [to, value, bytes] {
                        std::memset(to, value, bytes);
                        return true;
                      }},
                     lock);
}
