#pragma once

// What streams were given while they captured: nodes, each with those that it
// runs after. The end of a capture checks that all of it leads back to the
// stream that began; a launch puts the nodes on one stream, in an order that
// the seed chooses among those that the graph allows.
//
//   a   begin | k1 | record e                  | wait f | k3 | end
//   b                           wait e | k2 | record f
//
//   k2 runs after k1, and k3 after both.

#include <cuda_runtime.h>

#include <cstddef>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/cuda/emulator/streams.h"

namespace emulator {

struct Capture {
  struct Node {
    Work work;
    std::vector<std::size_t> after;
  };

  Stream* origin = nullptr;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  std::thread::id thread;
  std::vector<Node> nodes;
  /// The first call that was not allowed; empty while the capture is good.
  std::string why_void;

  void add(Stream& stream, Work work);
  /// False where a stream that joined has work that `origin` does not wait for.
  bool all_lead_to(const Stream& stream) const;
  /// The nodes in an order that a launch may run them in.
  std::vector<std::size_t> order() const;
};

/// The error of `function`, which waits for a stream or an event that is
/// captured, or asks for it. The capture is void from here on.
cudaError_t refuse(Capture& capture, const char* function,
                   cudaError_t error = cudaErrorStreamCaptureUnsupported);
/// The same for calls that reach past streams, such as cudaMalloc: cudaSuccess
/// unless a capture forbids them to this thread.
cudaError_t refuse_unsafe(Runtime& runtime, const char* function);

}  // namespace emulator

/// Opens the calls that a thread which captures must not make.
#define EMULATOR_ENTER_UNSAFE()                                             \
  EMULATOR_ENTER();                                                         \
  if (const cudaError_t error = emulator::refuse_unsafe(runtime, __func__); \
      error != cudaSuccess) {                                               \
    return error;                                                           \
  }
