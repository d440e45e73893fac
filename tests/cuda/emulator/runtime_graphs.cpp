// Graphs: work that is captured once and launched many times.

#include <algorithm>
#include <utility>

#include "tests/cuda/emulator/capture.h"
#include "tests/cuda/emulator/emulator.h"
#include "tests/cuda/emulator/order.h"

namespace emulator {
namespace {

thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

std::string stream_text(const Stream& stream) {
  return "stream " + std::to_string(stream.number);
}

void insert(std::vector<std::size_t>& to,
            const std::vector<std::size_t>& from) {
  for (const std::size_t node : from) {
    if (std::find(to.begin(), to.end(), node) == to.end()) to.push_back(node);
  }
}

}  // namespace

void Capture::add(Stream& stream, Work work) {
  nodes.push_back({std::move(work), stream.tips});
  stream.tips = {nodes.size() - 1};
}

bool Capture::all_lead_to(const Stream& stream) const {
  std::vector<bool> seen(nodes.size());
  std::vector<std::size_t> open = stream.tips;
  while (!open.empty()) {
    const std::size_t node = open.back();
    open.pop_back();
    if (seen[node]) continue;
    seen[node] = true;
    open.insert(open.end(), nodes[node].after.begin(), nodes[node].after.end());
  }
  return std::all_of(seen.begin(), seen.end(), [](bool is) { return is; });
}

std::vector<std::size_t> Capture::order() const {
  std::vector<std::size_t> left(nodes.size()), result;
  for (std::size_t i = 0; i < left.size(); ++i) left[i] = i;
  std::vector<bool> done(nodes.size());
  while (!left.empty()) {
    // The first node that is left may always run: it was captured before those
    // that wait for it.
    std::vector<std::size_t> may_run;
    for (std::size_t i = 0; i < left.size() && i < 64; ++i) {
      const auto& after = nodes[left[i]].after;
      if (std::all_of(after.begin(), after.end(),
                      [&](std::size_t node) { return done[node]; })) {
        may_run.push_back(i);
      }
      if (seed() <= 1) break;
    }
    const std::size_t i =
        may_run[seed() > 1 ? random_below(may_run.size()) : 0];
    done[left[i]] = true;
    result.push_back(left[i]);
    left.erase(left.begin() + static_cast<std::ptrdiff_t>(i));
  }
  return result;
}

cudaError_t refuse(Capture& capture, const char* function, cudaError_t error) {
  const std::string text = std::string(function) + ": not permitted while " +
                           stream_text(*capture.origin) + " captures";
  if (capture.why_void.empty()) capture.why_void = text;
  return report(error, text);
}

cudaError_t refuse_unsafe(Runtime& runtime, const char* function) {
  if (thread_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  const auto here = std::this_thread::get_id();
  for (const auto& [handle, stream] : runtime.streams) {
    Capture* const capture = stream->capture.get();
    if (capture == nullptr || capture->mode == cudaStreamCaptureModeRelaxed) {
      continue;
    }
    const bool reaches_others = capture->mode == cudaStreamCaptureModeGlobal &&
                                thread_mode == cudaStreamCaptureModeGlobal;
    if (capture->thread == here || reaches_others) {
      return refuse(*capture, function);
    }
  }
  return cudaSuccess;
}

cudaError_t capture_wait(Stream& stream, const Event& event) {
  if (event.capture == nullptr) {
    return refuse(*stream.capture, "cudaStreamWaitEvent, for work from before,",
                  cudaErrorStreamCaptureIsolation);
  }
  if (event.capture->origin == nullptr) {
    return report(cudaErrorCapturedEvent,
                  "cudaStreamWaitEvent: the event was recorded in a capture "
                  "that has ended");
  }
  if (stream.capture != nullptr && stream.capture != event.capture) {
    refuse(*stream.capture, "cudaStreamWaitEvent, for another capture,");
    return refuse(*event.capture, "cudaStreamWaitEvent, by another capture,",
                  cudaErrorStreamCaptureMerge);
  }
  stream.capture = event.capture;  // it joins
  insert(stream.tips, event.tips);
  return cudaSuccess;
}

}  // namespace emulator

using emulator::Capture;
using emulator::gone;
using emulator::report;
using emulator::Runtime;
using emulator::Stream;

namespace {

std::shared_ptr<Capture> find(
    const std::map<Capture*, std::shared_ptr<Capture>>& all, void* handle) {
  const auto found = all.find(static_cast<Capture*>(handle));
  return found == all.end() ? nullptr : found->second;
}

}  // namespace

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  EMULATOR_ENTER();
  std::swap(*mode, emulator::thread_mode);
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t handle,
                                   cudaStreamCaptureMode mode) {
  EMULATOR_ENTER();
  if (handle == nullptr) return report(cudaErrorStreamCaptureUnsupported);
  const auto stream = runtime.find(handle);
  if (stream == nullptr) return gone(__func__, "stream");
  if (stream->capture != nullptr) return report(cudaErrorIllegalState);
  stream->capture = std::make_shared<Capture>();
  stream->capture->origin = stream.get();
  stream->capture->mode = mode;
  stream->capture->thread = std::this_thread::get_id();
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle,
                                  cudaStreamCaptureStatus* status) {
  EMULATOR_ENTER();
  const auto stream = runtime.find(handle);
  if (stream == nullptr) return gone(__func__, "stream");
  *status = stream->capture == nullptr ? cudaStreamCaptureStatusNone
            : stream->capture->why_void.empty()
                ? cudaStreamCaptureStatusActive
                : cudaStreamCaptureStatusInvalidated;
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  EMULATOR_ENTER();
  *graph = nullptr;
  const auto stream = runtime.find(handle);
  if (stream == nullptr) return gone(__func__, "stream");
  const auto capture = stream->capture;
  if (capture == nullptr) return report(cudaErrorIllegalState);
  if (capture->origin != stream.get()) {
    return emulator::refuse(*capture, __func__,
                            cudaErrorStreamCaptureUnmatched);
  }
  if (capture->mode != cudaStreamCaptureModeRelaxed &&
      capture->thread != std::this_thread::get_id()) {
    return emulator::refuse(*capture, __func__,
                            cudaErrorStreamCaptureWrongThread);
  }
  const bool is_whole = capture->all_lead_to(*stream);
  capture->origin = nullptr;
  for (const auto& [each, owner] : runtime.streams) {
    if (owner->capture != capture) continue;
    owner->capture = nullptr;
    owner->tips.clear();
  }
  if (!capture->why_void.empty()) {
    return report(cudaErrorStreamCaptureInvalidated, capture->why_void);
  }
  if (!is_whole) {
    return report(cudaErrorStreamCaptureUnjoined,
                  "cudaStreamEndCapture: a stream that joined the capture has "
                  "work that nobody waits for");
  }
  runtime.graphs[capture.get()] = capture;
  *graph = reinterpret_cast<cudaGraph_t>(capture.get());
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  EMULATOR_ENTER();
  return runtime.graphs.erase(reinterpret_cast<Capture*>(graph)) == 1
             ? cudaSuccess
             : gone(__func__, "graph");
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* exec,
                                          cudaGraph_t graph,
                                          unsigned long long) {
  EMULATOR_ENTER();
  const auto found = find(runtime.graphs, graph);
  if (found == nullptr) return gone(__func__, "graph");
  const auto made = std::make_shared<Capture>(*found);
  runtime.executables[made.get()] = made;
  *exec = reinterpret_cast<cudaGraphExec_t>(made.get());
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t handle) {
  EMULATOR_ENTER();
  const auto found = find(runtime.executables, exec);
  if (found == nullptr) return gone(__func__, "executable graph");
  const auto stream = runtime.find(handle);
  if (stream == nullptr) return gone(__func__, "stream");
  for (const std::size_t node : found->order()) {
    const cudaError_t error =
        runtime.add(stream, found->nodes[node].work, lock);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// What was launched is still done.
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  EMULATOR_ENTER();
  return runtime.executables.erase(reinterpret_cast<Capture*>(exec)) == 1
             ? cudaSuccess
             : gone(__func__, "executable graph");
}
