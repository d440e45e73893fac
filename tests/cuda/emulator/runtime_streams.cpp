// Streams and events.

#include <chrono>
#include <limits>

#include "tests/cuda/emulator/capture.h"
#include "tests/cuda/emulator/device_memory.h"
#include "tests/cuda/emulator/streams.h"

using emulator::Event;
using emulator::gone;
using emulator::report;
using emulator::Runtime;
using emulator::Stream;

namespace {

// How often a query says "not ready" before it lets the work be done.
constexpr int kQueries = 2;

Event* find_event(Runtime& runtime, cudaEvent_t handle) {
  const auto found = runtime.events.find(reinterpret_cast<Event*>(handle));
  return found == runtime.events.end() ? nullptr : found->second.get();
}

// The host asks for an event that a capture has: it never happens.
cudaError_t is_captured(const Event& event, const char* function) {
  if (event.capture->origin == nullptr) return report(cudaErrorCapturedEvent);
  return emulator::refuse(*event.capture, function, cudaErrorCapturedEvent);
}

double seconds() {
  return std::chrono::duration<double>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

cudaError_t query(Runtime& runtime, Stream& stream, std::uint64_t position,
                  int& queries) {
  if (stream.done < position) {
    if (queries++ < kQueries || !runtime.try_advance(stream, position)) {
      return cudaErrorNotReady;
    }
  }
  queries = 0;
  return emulator::report_failure(runtime, stream.device);
}

}  // namespace

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  EMULATOR_ENTER();
  const auto made = runtime.make_stream((flags & cudaStreamNonBlocking) == 0);
  runtime.streams[made.get()] = made;
  *stream = reinterpret_cast<cudaStream_t>(made.get());
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}

// What was on it is still done, when somebody waits for it.
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  EMULATOR_ENTER();
  if (runtime.streams.erase(reinterpret_cast<Stream*>(stream)) == 0) {
    return gone(__func__, "stream");
  }
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  EMULATOR_ENTER();
  const auto stream = runtime.find(handle);
  if (stream == nullptr) return gone(__func__, "stream");
  if (stream->capture) return emulator::refuse(*stream->capture, __func__);
  runtime.advance(stream, stream->issued, lock);
  return emulator::report_failure(runtime, stream->device);
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  EMULATOR_ENTER();
  const auto stream = runtime.find(handle);
  if (stream == nullptr) return gone(__func__, "stream");
  if (stream->capture) return emulator::refuse(*stream->capture, __func__);
  return query(runtime, *stream, stream->issued, stream->queries);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle,
                                unsigned) {
  EMULATOR_ENTER();
  const auto stream = runtime.find(handle);
  if (stream == nullptr) return gone(__func__, "stream");
  const Event* const event = find_event(runtime, event_handle);
  if (event == nullptr) return gone(__func__, "event");
  if (event->capture != nullptr || stream->capture != nullptr) {
    return emulator::capture_wait(*stream, *event);
  }
  if (event->stream == nullptr) {
    // CUDA says nothing, and does not wait.
    return report(cudaErrorInvalidValue,
                  "cudaStreamWaitEvent: the event was never recorded");
  }
  emulator::Work work;
  work.name = __func__;
  work.other = event->stream;
  work.position = event->position;
  return runtime.add(stream, std::move(work), lock);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  EMULATOR_ENTER();
  auto made = std::make_unique<Event>();
  made->device = emulator::current_device();
  *event = reinterpret_cast<cudaEvent_t>(made.get());
  runtime.events[made.get()] = std::move(made);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, cudaEventDefault);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  EMULATOR_ENTER();
  if (runtime.events.erase(reinterpret_cast<Event*>(event)) == 0) {
    return gone(__func__, "event");
  }
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream_handle) {
  EMULATOR_ENTER();
  const auto stream = runtime.find(stream_handle);
  if (stream == nullptr) return gone(__func__, "stream");
  Event* const event = find_event(runtime, handle);
  if (event == nullptr) return gone(__func__, "event");
  if (event->device != stream->device) {
    return report(cudaErrorInvalidResourceHandle,
                  "cudaEventRecord: the event is of device " +
                      std::to_string(event->device) +
                      ", the stream of device " +
                      std::to_string(stream->device));
  }
  event->capture = stream->capture;
  event->tips = stream->tips;
  if (event->capture != nullptr) return cudaSuccess;
  event->stream = stream;
  event->position = stream->issued + 1;
  event->queries = 0;
  event->time = std::make_shared<double>(0);
  return runtime.add(stream,
                     {__func__,
                      [time = event->time] {
                        *time = seconds();
                        return true;
                      }},
                     lock);
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  EMULATOR_ENTER();
  const Event* const event = find_event(runtime, handle);
  if (event == nullptr) return gone(__func__, "event");
  if (event->capture) return is_captured(*event, __func__);
  if (event->stream == nullptr) return cudaSuccess;
  // The event may be recorded again, or destroyed, by another thread.
  const auto stream = event->stream;
  runtime.advance(stream, event->position, lock);
  return emulator::report_failure(runtime, stream->device);
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  EMULATOR_ENTER();
  Event* const event = find_event(runtime, handle);
  if (event == nullptr) return gone(__func__, "event");
  if (event->capture) return is_captured(*event, __func__);
  if (event->stream == nullptr) return cudaSuccess;
  return query(runtime, *event->stream, event->position, event->queries);
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t earlier,
                                 cudaEvent_t later) {
  EMULATOR_ENTER();
  const Event* const events[] = {find_event(runtime, earlier),
                                 find_event(runtime, later)};
  for (const Event* const event : events) {
    if (event == nullptr) return gone(__func__, "event");
    if (event->capture) return is_captured(*event, __func__);
    if (event->stream == nullptr) {
      return report(cudaErrorInvalidResourceHandle,
                    "cudaEventElapsedTime: the event was never recorded");
    }
    if (event->stream->done < event->position) return cudaErrorNotReady;
  }
  *milliseconds =
      static_cast<float>((*events[1]->time - *events[0]->time) * 1e3);
  return cudaSuccess;
}
