#pragma once

// Memory, streams and events of real devices. Read by core/ and comm/ only.
//
// core is built without CUDA. The runtime and the kernels of core/kernels/cuda
// are a shared library of their own, libshardbook_cuda.so, which is loaded when
// the first CUDA device is made. The tests load another build of the same
// sources, whose GPU is an emulator.

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/gpus.h"

namespace shardbook {
class KernelContext;
}

namespace shardbook::internal {

/// Streams (cudaStream_t) and events (cudaEvent_t) are passed as void*. A call
/// that fails throws Error with the call, its sizes and CUDA's message. Safe to
/// use from several threads; each uses the device that it chose last.
class DeviceRuntime {
 public:
  virtual ~DeviceRuntime() = default;

  virtual int count() const = 0;
  virtual Gpu properties(int index) const = 0;
  /// "CUDA 13.0, driver 580.159, cuBLASLt 13.1, cuDNN 9.14", for `doctor`.
  virtual std::string versions() const = 0;
  /// All later calls of this thread apply to device `index`.
  virtual void use(int index) = 0;

  /// Null when the device has no memory left. Allowed during a capture.
  virtual void* allocate(std::size_t bytes) = 0;
  virtual void free(void* pointer) = 0;
  /// Host memory that copies to and from the device need not stage.
  virtual void* allocate_pinned(std::size_t bytes) = 0;
  virtual void free_pinned(void* pointer) = 0;

  virtual void* make_stream() = 0;
  virtual void destroy_stream(void* stream) = 0;
  virtual void synchronize_stream(void* stream) = 0;

  virtual void* make_event() = 0;
  virtual void destroy_event(void* event) = 0;
  virtual void record_event(void* event, void* stream) = 0;
  /// Work that `stream` is given from now on runs after the event.
  virtual void hold_stream(void* stream, void* event) = 0;
  virtual void synchronize_event(void* event) = 0;
  virtual bool event_has_passed(void* event) = 0;
  virtual double seconds_between(void* earlier, void* later) = 0;

  /// From now on, work that this thread issues to `stream` is recorded and not
  /// run. Calls that wait for the stream fail and invalidate the recording.
  virtual void begin_capture(void* stream) = 0;
  /// Ends the recording and returns it as a graph (cudaGraphExec_t).
  virtual void* end_capture(void* stream) = 0;
  /// Ends the recording and discards it.
  virtual void drop_capture(void* stream) noexcept = 0;
  virtual void launch_graph(void* graph, void* stream) = 0;
  virtual void destroy_graph(void* graph) = 0;

  /// Copies between any two of host and devices, in the order of `stream`. May
  /// return before the copy is done: host memory must stay untouched until the
  /// stream is synchronized.
  virtual void copy(void* to, const void* from, std::size_t bytes,
                    void* stream) = 0;
  virtual void fill_zero(void* to, std::size_t bytes, void* stream) = 0;

  /// Throws the Error that a kernel of this context has reported since the last
  /// call (an index outside its table). Call it after synchronizing.
  virtual void check_kernels(KernelContext& context) = 0;
};

/// The runtime of CUDA devices; loads the library at the first call. Throws
/// Error with the reason where there is none: not built, no driver, no GPU.
DeviceRuntime& cuda_runtime();
/// Why cuda_runtime() would throw; empty where it would not.
std::string why_no_cuda();

}  // namespace shardbook::internal
