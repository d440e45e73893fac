// Graphs of the stand-in: what is captured runs at each launch and not before,
// and calls that CUDA forbids meanwhile are named.

#include <gmock/gmock.h>

#include <functional>
#include <thread>

#include "core/internal/device_runtime.h"
#include "tests/cuda/parity.h"
#include "tests/cuda/test_support.h"
#include "tests/support/errors.h"

namespace emulator {
namespace {

using testing::Each;
using testing::HasSubstr;

__global__ void add(float* x, int n, float value) {
  for (int i = static_cast<int>(threadIdx.x); i < n; i += 32) x[i] += value;
}
__global__ void scale_into(const float* from, float* to, int n, float value) {
  for (int i = static_cast<int>(threadIdx.x); i < n; i += 32) {
    to[i] = from[i] * value;
  }
}

cudaGraphExec_t end_capture(cudaStream_t stream) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t result = nullptr;
  ok(cudaStreamEndCapture(stream, &graph));
  ok(cudaGraphInstantiateWithFlags(&result, graph, 0));
  ok(cudaGraphDestroy(graph));
  return result;
}

class Graphs : public OnTwoStreams {
 protected:
  void begin(cudaStreamCaptureMode mode = cudaStreamCaptureModeThreadLocal) {
    ok(cudaStreamBeginCapture(a, mode));
  }
  cudaGraphExec_t end() { return end_capture(a); }
  void run(cudaGraphExec_t graph) {
    ok(cudaGraphLaunch(graph, a));
    ok(cudaStreamSynchronize(a));
  }
  void add_on(cudaStream_t stream, float* to, float value) {
    launch("add", 1, 32, stream, add, to, kCount, value);
  }
  void scale_on(cudaStream_t stream, const float* from, float* to,
                float value) {
    launch("scale_into", 1, 32, stream, scale_into, from, to, kCount, value);
  }

  const OwnEvent fork, join;
  const Device<float> x{std::vector<float>(kCount, 1.0f)};
  const Device<float> y{std::vector<float>(kCount, 0.0f)};
};
INSTANTIATE_TEST_SUITE_P(Seeds, Graphs, testing::Values(0, 1, 2, 3, 4, 5));

TEST_P(Graphs, RunAtEachLaunchAndNotBefore) {
  begin();
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  ok(cudaStreamIsCapturing(a, &status));
  EXPECT_EQ(status, cudaStreamCaptureStatusActive);
  add_on(a, x.data(), 2);
  ok(cudaMemcpyAsync(y.data(), x.data(), kBytes, cudaMemcpyDefault, a));
  ok(cudaMemsetAsync(x.data(), 0, kBytes / 2, a));
  const cudaGraphExec_t graph = end();
  ok(cudaStreamSynchronize(a));
  EXPECT_THAT(x.values(), Each(1.0f));
  run(graph);
  EXPECT_THAT(y.values(), Each(3.0f));
  run(graph);
  EXPECT_EQ(y.values().front(), 2.0f);
  EXPECT_EQ(y.values().back(), 5.0f);
  ok(cudaGraphExecDestroy(graph));
}

TEST_P(Graphs, EventsTakeOtherStreamsIn) {
  begin();
  add_on(a, x.data(), 1);
  ok(cudaEventRecord(fork, a));
  ok(cudaStreamWaitEvent(b, fork));
  scale_on(b, x.data(), y.data(), 10);
  ok(cudaEventRecord(join, b));
  ok(cudaStreamWaitEvent(a, join));
  add_on(a, y.data(), 1);
  const cudaGraphExec_t graph = end();
  run(graph);
  EXPECT_THAT(y.values(), Each(21.0f));
  add_on(b, y.data(), 1);  // captured no more
  ok(cudaStreamSynchronize(b));
  EXPECT_THAT(y.values(), Each(22.0f));
  run(graph);
  EXPECT_THAT(y.values(), Each(31.0f));
  ok(cudaGraphExecDestroy(graph));
}

// The event lies before the work that should have been waited for.
TEST(GraphsOverSeeds, AMissingWaitInsideShowsInSomeOrder) {
  int wrong = 0;
  for (int seed = 2; seed < 30; ++seed) {
    set_seed(static_cast<std::uint64_t>(seed));
    const Device<float> x(std::vector<float>(40, 1.0f)),
        y(std::vector<float>(40, 0.0f));
    const OwnStream a, b;
    const OwnEvent fork, join;
    ok(cudaStreamBeginCapture(a, cudaStreamCaptureModeGlobal));
    ok(cudaEventRecord(fork, a));
    launch("add", 1, 32, a, add, x.data(), 40, 1.0f);
    ok(cudaStreamWaitEvent(b, fork));
    launch("scale_into", 1, 32, b, scale_into, x.data(), y.data(), 40, 1.0f);
    ok(cudaEventRecord(join, b));
    ok(cudaStreamWaitEvent(a, join));
    const cudaGraphExec_t exec = end_capture(a);
    ok(cudaGraphLaunch(exec, a));
    ok(cudaStreamSynchronize(a));
    wrong += y.values()[0] == 1.0f;
    ok(cudaGraphExecDestroy(exec));
  }
  set_seed(0);
  EXPECT_GT(wrong, 0);
  EXPECT_LT(wrong, 28);
}

// --- Refused -----------------------------------------------------------------

class GraphRefusals : public Graphs {
 protected:
  // Makes `call` during a capture; expects its error, and that the capture's end
  // names what made it void.
  void expect_refused(const std::function<cudaError_t()>& call,
                      cudaError_t expected, const std::string& name) {
    SCOPED_TRACE(name);
    begin();
    add_on(a, x.data(), 1);
    ok(cudaEventRecord(fork, a));
    EXPECT_EQ(call(), expected);
    EXPECT_THAT(cudaGetErrorString(expected), HasSubstr(name));
    add_on(a, x.data(), 1);
    EXPECT_EQ(cudaGetLastError(), cudaErrorStreamCaptureInvalidated);
    cudaGraph_t graph = nullptr;
    const cudaError_t error = cudaStreamEndCapture(a, &graph);
    EXPECT_EQ(error, cudaErrorStreamCaptureInvalidated);
    EXPECT_THAT(cudaGetErrorString(error), HasSubstr(name));
    EXPECT_EQ(graph, nullptr);
    (void)cudaGetLastError();
  }
};
INSTANTIATE_TEST_SUITE_P(Seeds, GraphRefusals, testing::Values(0));

TEST_P(GraphRefusals, CallsThatWaitOrAllocateMakeTheCaptureVoid) {
  void* pointer = nullptr;
  float pageable[kCount];
  ok(cudaEventRecord(join, b));
  const auto expect_unsupported = [&](const char* name, const auto& call) {
    expect_refused(call, cudaErrorStreamCaptureUnsupported, name);
  };
  expect_unsupported("cudaStreamSynchronize",
                     [&] { return cudaStreamSynchronize(a); });
  expect_unsupported("cudaStreamQuery", [&] { return cudaStreamQuery(a); });
  expect_unsupported("cudaDeviceSynchronize", &cudaDeviceSynchronize);
  expect_unsupported("cudaMalloc", [&] { return cudaMalloc(&pointer, 4); });
  expect_unsupported("cudaFree", [&] { return cudaFree(x.data()); });
  expect_unsupported("cudaHostAlloc",
                     [&] { return cudaHostAlloc(&pointer, 4, 0); });
  expect_unsupported("cudaFreeHost", [&] { return cudaFreeHost(host); });
  expect_unsupported("pageable memory", [&] {
    return cudaMemcpyAsync(pageable, x.data(), kBytes, cudaMemcpyDefault, a);
  });
  expect_refused([&] { return cudaEventQuery(fork); }, cudaErrorCapturedEvent,
                 "cudaEventQuery");
  expect_refused([&] { return cudaEventSynchronize(fork); },
                 cudaErrorCapturedEvent, "cudaEventSynchronize");
  expect_refused([&] { return cudaStreamWaitEvent(a, join); },
                 cudaErrorStreamCaptureIsolation, "cudaStreamWaitEvent");
  EXPECT_THAT(x.values(), Each(1.0f));
}

TEST_P(GraphRefusals, MemoryIsAllocatedWhereTheThreadSaysSo) {
  begin();
  void* pointer = nullptr;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  ok(cudaThreadExchangeStreamCaptureMode(&mode));
  ok(cudaMalloc(&pointer, 4));
  ok(cudaThreadExchangeStreamCaptureMode(&mode));
  EXPECT_EQ(mode, cudaStreamCaptureModeRelaxed);
  // Pinned memory may be copied to
  ok(cudaMemcpyAsync(host, x.data(), kBytes, cudaMemcpyDefault, a));
  const cudaGraphExec_t graph = end();
  run(graph);
  EXPECT_EQ(host[0], 1.0f);
  ok(cudaGraphExecDestroy(graph));
  ok(cudaFree(pointer));
}

TEST_P(GraphRefusals, OtherThreadsMayAllocateUnlessTheCaptureIsGlobal) {
  for (const auto& [mode, expected] :
       {std::pair(cudaStreamCaptureModeThreadLocal, cudaSuccess),
        std::pair(cudaStreamCaptureModeGlobal,
                  cudaErrorStreamCaptureUnsupported)}) {
    begin(mode);
    cudaError_t error = cudaErrorUnknown;
    std::thread([&error] {
      void* pointer = nullptr;
      error = cudaMalloc(&pointer, 4);
      EXPECT_EQ(cudaFree(pointer), error);  // of null, or refused as well
    }).join();
    EXPECT_EQ(error, expected);
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(cudaStreamEndCapture(a, &graph) == cudaSuccess,
              expected == cudaSuccess);
    if (graph == nullptr) continue;
    ok(cudaGraphDestroy(graph));
  }
}

TEST_P(GraphRefusals, TheEndMustBeOfTheSameStreamAndWaitForAllOthers) {
  begin();
  ok(cudaEventRecord(fork, a));
  ok(cudaStreamWaitEvent(b, fork));
  add_on(b, x.data(), 1);
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(a, &graph), cudaErrorStreamCaptureUnjoined);
  // b is free again; the event belongs to nothing any more
  ok(cudaStreamSynchronize(b));
  EXPECT_EQ(cudaStreamWaitEvent(b, fork), cudaErrorCapturedEvent);
  EXPECT_EQ(cudaStreamEndCapture(a, &graph), cudaErrorIllegalState);

  begin();
  ok(cudaEventRecord(fork, a));
  ok(cudaStreamWaitEvent(b, fork));
  EXPECT_EQ(cudaStreamEndCapture(b, &graph), cudaErrorStreamCaptureUnmatched);
  EXPECT_EQ(cudaStreamEndCapture(a, &graph), cudaErrorStreamCaptureInvalidated);
}

// --- The runtime of core on graphs -------------------------------------------

TEST(GraphsOfCore, EachReturnCodeIsChecked) {
  shardbook::parity::choose_library();
  auto& runtime = shardbook::internal::cuda_runtime();
  runtime.use(0);
  void* const stream = runtime.make_stream();
  void* const memory = runtime.allocate(64);
  const auto record = [&] {
    runtime.begin_capture(stream);
    runtime.fill_zero(memory, 64, stream);
    return runtime.end_capture(stream);
  };
  const auto expect_error = [](const std::string& function, auto call) {
    fail_call(function);
    shardbook::expect_error(call, {function});
  };
  for (const char* function : {"cudaStreamBeginCapture", "cudaStreamEndCapture",
                               "cudaGraphInstantiateWithFlags"}) {
    expect_error(function, record);
    runtime.drop_capture(stream);
  }
  void* const graph = record();
  expect_error("cudaGraphLaunch", [&] { runtime.launch_graph(graph, stream); });
  runtime.launch_graph(graph, stream);
  runtime.synchronize_stream(stream);
  expect_error("cudaGraphExecDestroy", [&] { runtime.destroy_graph(graph); });
  runtime.destroy_graph(graph);
  runtime.free(memory);
  runtime.destroy_stream(stream);
}

}  // namespace
}  // namespace emulator
