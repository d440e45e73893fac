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

class Graphs : public OverSeeds {
 protected:
  void SetUp() override {
    OverSeeds::SetUp();
    for (cudaStream_t* stream : {&a, &b}) {
      ASSERT_EQ(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking),
                cudaSuccess);
    }
    for (cudaEvent_t* event : {&fork, &join}) {
      ASSERT_EQ(cudaEventCreate(event), cudaSuccess);
    }
    ASSERT_EQ(cudaHostAlloc(&host, kBytes, 0), cudaSuccess);
  }
  void TearDown() override {
    reset();
    EXPECT_EQ(cudaFreeHost(host), cudaSuccess);
    for (cudaEvent_t event : {fork, join}) {
      EXPECT_EQ(cudaEventDestroy(event), cudaSuccess);
    }
    for (cudaStream_t stream : {a, b}) {
      EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
    }
    OverSeeds::TearDown();
  }

  void begin(cudaStreamCaptureMode mode = cudaStreamCaptureModeThreadLocal) {
    ASSERT_EQ(cudaStreamBeginCapture(a, mode), cudaSuccess);
  }
  cudaGraphExec_t end() {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t result = nullptr;
    EXPECT_EQ(cudaStreamEndCapture(a, &graph), cudaSuccess);
    EXPECT_EQ(cudaGraphInstantiateWithFlags(&result, graph, 0), cudaSuccess);
    EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
    return result;
  }
  void run(cudaGraphExec_t graph) {
    EXPECT_EQ(cudaGraphLaunch(graph, a), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(a), cudaSuccess);
  }
  void add_on(cudaStream_t stream, float* to, float value) {
    launch("add", 1, 32, stream, add, to, kCount, value);
  }
  void scale_on(cudaStream_t stream, const float* from, float* to,
                float value) {
    launch("scale_into", 1, 32, stream, scale_into, from, to, kCount, value);
  }

  static constexpr int kCount = 40;
  static constexpr std::size_t kBytes = kCount * sizeof(float);
  cudaStream_t a, b;
  cudaEvent_t fork, join;
  float* host;
  const Device<float> x{std::vector<float>(kCount, 1.0f)};
  const Device<float> y{std::vector<float>(kCount, 0.0f)};
};
INSTANTIATE_TEST_SUITE_P(Seeds, Graphs, testing::Values(0, 1, 2, 3, 4, 5));

TEST_P(Graphs, RunAtEachLaunchAndNotBefore) {
  begin();
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  ASSERT_EQ(cudaStreamIsCapturing(a, &status), cudaSuccess);
  EXPECT_EQ(status, cudaStreamCaptureStatusActive);
  add_on(a, x.data(), 2);
  EXPECT_EQ(cudaMemcpyAsync(y.data(), x.data(), kBytes, cudaMemcpyDefault, a),
            cudaSuccess);
  EXPECT_EQ(cudaMemsetAsync(x.data(), 0, kBytes / 2, a), cudaSuccess);
  const cudaGraphExec_t graph = end();
  ASSERT_EQ(cudaStreamSynchronize(a), cudaSuccess);
  EXPECT_THAT(x.values(), Each(1.0f));
  run(graph);
  EXPECT_THAT(y.values(), Each(3.0f));
  run(graph);
  EXPECT_EQ(y.values().front(), 2.0f);
  EXPECT_EQ(y.values().back(), 5.0f);
  EXPECT_EQ(cudaGraphExecDestroy(graph), cudaSuccess);
}

TEST_P(Graphs, EventsTakeOtherStreamsIn) {
  begin();
  add_on(a, x.data(), 1);
  ASSERT_EQ(cudaEventRecord(fork, a), cudaSuccess);
  ASSERT_EQ(cudaStreamWaitEvent(b, fork), cudaSuccess);
  scale_on(b, x.data(), y.data(), 10);
  ASSERT_EQ(cudaEventRecord(join, b), cudaSuccess);
  ASSERT_EQ(cudaStreamWaitEvent(a, join), cudaSuccess);
  add_on(a, y.data(), 1);
  const cudaGraphExec_t graph = end();
  run(graph);
  EXPECT_THAT(y.values(), Each(21.0f));
  add_on(b, y.data(), 1);  // captured no more
  EXPECT_EQ(cudaStreamSynchronize(b), cudaSuccess);
  EXPECT_THAT(y.values(), Each(22.0f));
  run(graph);
  EXPECT_THAT(y.values(), Each(31.0f));
  EXPECT_EQ(cudaGraphExecDestroy(graph), cudaSuccess);
}

// The event lies before the work that should have been waited for.
TEST(GraphsOverSeeds, AMissingWaitInsideShowsInSomeOrder) {
  int wrong = 0;
  for (int seed = 2; seed < 30; ++seed) {
    set_seed(static_cast<std::uint64_t>(seed));
    const Device<float> x(std::vector<float>(40, 1.0f)),
        y(std::vector<float>(40, 0.0f));
    cudaStream_t a, b;
    cudaEvent_t fork, join;
    for (cudaStream_t* stream : {&a, &b})
      ASSERT_EQ(cudaStreamCreate(stream), 0);
    for (cudaEvent_t* event : {&fork, &join})
      ASSERT_EQ(cudaEventCreate(event), 0);
    ASSERT_EQ(cudaStreamBeginCapture(a, cudaStreamCaptureModeGlobal), 0);
    ASSERT_EQ(cudaEventRecord(fork, a), 0);
    launch("add", 1, 32, a, add, x.data(), 40, 1.0f);
    ASSERT_EQ(cudaStreamWaitEvent(b, fork), 0);
    launch("scale_into", 1, 32, b, scale_into, x.data(), y.data(), 40, 1.0f);
    ASSERT_EQ(cudaEventRecord(join, b), 0);
    ASSERT_EQ(cudaStreamWaitEvent(a, join), 0);
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    ASSERT_EQ(cudaStreamEndCapture(a, &graph), 0);
    ASSERT_EQ(cudaGraphInstantiateWithFlags(&exec, graph, 0), 0);
    ASSERT_EQ(cudaGraphLaunch(exec, a), 0);
    ASSERT_EQ(cudaStreamSynchronize(a), 0);
    wrong += y.values()[0] == 1.0f;
    ASSERT_EQ(cudaGraphExecDestroy(exec), 0);
    ASSERT_EQ(cudaGraphDestroy(graph), 0);
    for (cudaEvent_t event : {fork, join})
      ASSERT_EQ(cudaEventDestroy(event), 0);
    for (cudaStream_t stream : {a, b}) ASSERT_EQ(cudaStreamDestroy(stream), 0);
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
    ASSERT_EQ(cudaEventRecord(fork, a), cudaSuccess);
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
  const cudaError_t unsupported = cudaErrorStreamCaptureUnsupported;
  void* pointer = nullptr;
  float pageable[kCount];
  expect_refused([&] { return cudaStreamSynchronize(a); }, unsupported,
                 "cudaStreamSynchronize");
  expect_refused([&] { return cudaStreamQuery(a); }, unsupported,
                 "cudaStreamQuery");
  expect_refused([] { return cudaDeviceSynchronize(); }, unsupported,
                 "cudaDeviceSynchronize");
  expect_refused([&] { return cudaMalloc(&pointer, 4); }, unsupported,
                 "cudaMalloc");
  expect_refused([&] { return cudaFree(x.data()); }, unsupported, "cudaFree");
  expect_refused([&] { return cudaHostAlloc(&pointer, 4, 0); }, unsupported,
                 "cudaHostAlloc");
  expect_refused([&] { return cudaFreeHost(host); }, unsupported,
                 "cudaFreeHost");
  expect_refused([&] { return cudaEventQuery(fork); }, cudaErrorCapturedEvent,
                 "cudaEventQuery");
  expect_refused([&] { return cudaEventSynchronize(fork); },
                 cudaErrorCapturedEvent, "cudaEventSynchronize");
  expect_refused(
      [&] {
        return cudaMemcpyAsync(pageable, x.data(), kBytes, cudaMemcpyDefault,
                               a);
      },
      unsupported, "pageable memory");
  ASSERT_EQ(cudaEventRecord(join, b), cudaSuccess);
  expect_refused([&] { return cudaStreamWaitEvent(a, join); },
                 cudaErrorStreamCaptureIsolation, "cudaStreamWaitEvent");
  EXPECT_THAT(x.values(), Each(1.0f));
}

TEST_P(GraphRefusals, MemoryIsAllocatedWhereTheThreadSaysSo) {
  begin();
  void* pointer = nullptr;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  ASSERT_EQ(cudaThreadExchangeStreamCaptureMode(&mode), cudaSuccess);
  EXPECT_EQ(cudaMalloc(&pointer, 4), cudaSuccess);
  ASSERT_EQ(cudaThreadExchangeStreamCaptureMode(&mode), cudaSuccess);
  EXPECT_EQ(mode, cudaStreamCaptureModeRelaxed);
  // Pinned memory may be copied to
  EXPECT_EQ(cudaMemcpyAsync(host, x.data(), kBytes, cudaMemcpyDefault, a),
            cudaSuccess);
  const cudaGraphExec_t graph = end();
  run(graph);
  EXPECT_EQ(host[0], 1.0f);
  EXPECT_EQ(cudaGraphExecDestroy(graph), cudaSuccess);
  EXPECT_EQ(cudaFree(pointer), cudaSuccess);
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
    EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  }
}

TEST_P(GraphRefusals, TheEndMustBeOfTheSameStreamAndWaitForAllOthers) {
  begin();
  ASSERT_EQ(cudaEventRecord(fork, a), cudaSuccess);
  ASSERT_EQ(cudaStreamWaitEvent(b, fork), cudaSuccess);
  add_on(b, x.data(), 1);
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(a, &graph), cudaErrorStreamCaptureUnjoined);
  // b is free again; the event belongs to nothing any more
  EXPECT_EQ(cudaStreamSynchronize(b), cudaSuccess);
  EXPECT_EQ(cudaStreamWaitEvent(b, fork), cudaErrorCapturedEvent);
  EXPECT_EQ(cudaStreamEndCapture(a, &graph), cudaErrorIllegalState);

  begin();
  ASSERT_EQ(cudaEventRecord(fork, a), cudaSuccess);
  ASSERT_EQ(cudaStreamWaitEvent(b, fork), cudaSuccess);
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
