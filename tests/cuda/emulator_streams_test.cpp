// Streams whose work runs late: a missing wait shows, whatever the machine.

#include <gmock/gmock.h>

#include <atomic>
#include <cmath>
#include <thread>

#include "tests/cuda/test_support.h"

namespace emulator {
namespace {

using testing::Each;
using testing::HasSubstr;

__global__ void fill(float* x, int n, float value) {
  for (int i = static_cast<int>(threadIdx.x); i < n; i += 32) x[i] = value;
}
__global__ void copy(const float* from, float* to, int n) {
  for (int i = static_cast<int>(threadIdx.x); i < n; i += 32) to[i] = from[i];
}

class Streams : public OverSeeds {
 protected:
  void SetUp() override {
    OverSeeds::SetUp();
    for (cudaStream_t* stream : {&a, &b}) {
      ASSERT_EQ(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking),
                cudaSuccess);
    }
    ASSERT_EQ(cudaEventCreate(&event), cudaSuccess);
    ASSERT_EQ(cudaMalloc(&x, kBytes), cudaSuccess);
    ASSERT_EQ(cudaMalloc(&y, kBytes), cudaSuccess);
    ASSERT_EQ(cudaHostAlloc(&host, kBytes, 0), cudaSuccess);
  }
  void TearDown() override {
    reset();
    EXPECT_EQ(cudaFreeHost(host), cudaSuccess);
    EXPECT_EQ(cudaFree(y), cudaSuccess);
    EXPECT_EQ(cudaFree(x), cudaSuccess);
    EXPECT_EQ(cudaEventDestroy(event), cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(b), cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(a), cudaSuccess);
    OverSeeds::TearDown();
  }
  void fill_on(cudaStream_t stream, float* to, float value) {
    launch("fill", 1, 32, stream, fill, to, kCount, value);
  }
  void copy_on(cudaStream_t stream, const float* from, float* to) {
    launch("copy", 1, 32, stream, copy, from, to, kCount);
  }
  std::vector<float> read_after(cudaStream_t stream, const float* from) {
    EXPECT_EQ(
        cudaMemcpyAsync(host, from, kBytes, cudaMemcpyDeviceToHost, stream),
        cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    return std::vector<float>(host, host + kCount);
  }

  static constexpr int kCount = 40;
  static constexpr std::size_t kBytes = kCount * sizeof(float);
  cudaStream_t a, b;
  cudaEvent_t event;
  float *x, *y, *host;
};
class InOrder : public Streams {};
INSTANTIATE_TEST_SUITE_P(Seeds, Streams, testing::Values(0, 1, 2, 3, 4, 5));
// Seeds above 1 let other streams work early now and then.
INSTANTIATE_TEST_SUITE_P(Seeds, InOrder, testing::Values(0, 1));

TEST_P(InOrder, MissingWaitLeavesWhatNobodyWrote) {
  fill_on(a, x, 3);
  copy_on(b, x, y);
  EXPECT_THAT(read_after(b, y), Each(testing::IsNan()));
}

TEST_P(Streams, EventOrdersTwoStreams) {
  fill_on(a, x, 3);
  ASSERT_EQ(cudaEventRecord(event, a), cudaSuccess);
  ASSERT_EQ(cudaStreamWaitEvent(b, event), cudaSuccess);
  fill_on(a, x, 4);  // does not belong to the event, and runs later
  copy_on(b, x, y);
  EXPECT_THAT(read_after(b, y), Each(testing::AnyOf(3.0f, 4.0f)));
  EXPECT_THAT(read_after(a, x), Each(4.0f));
}

TEST_P(InOrder, WorkAfterTheEventIsNotWaitedFor) {
  fill_on(a, x, 3);
  ASSERT_EQ(cudaEventRecord(event, a), cudaSuccess);
  ASSERT_EQ(cudaStreamWaitEvent(b, event), cudaSuccess);
  fill_on(a, x, 4);
  copy_on(b, x, y);
  EXPECT_THAT(read_after(b, y), Each(3.0f));
}

// The opposite of a missing wait: `a` overwrites what `b` has yet to read.
TEST(StreamsOverSeeds, OverwritingTooEarlyShowsInSomeOrder) {
  int stale = 0;
  for (int seed = 2; seed < 40; ++seed) {
    set_seed(static_cast<std::uint64_t>(seed));
    const Device<float> x(std::vector<float>(40, 1.0f)),
        y(std::vector<float>(40, 0.0f));
    cudaStream_t a, b;
    ASSERT_EQ(cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking),
              cudaSuccess);
    ASSERT_EQ(cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking),
              cudaSuccess);
    launch("copy", 1, 32, b, copy, x.data(), y.data(), 40);
    launch("fill", 1, 32, a, fill, x.data(), 40, 2.0f);
    ASSERT_EQ(cudaStreamSynchronize(b), cudaSuccess);
    stale += y.values()[0] == 2.0f;
    ASSERT_EQ(cudaStreamDestroy(a), cudaSuccess);
    ASSERT_EQ(cudaStreamDestroy(b), cudaSuccess);
  }
  set_seed(0);
  EXPECT_GT(stale, 0);
  EXPECT_LT(stale, 38);
}

TEST_P(InOrder, HostThatReadsTooEarlyFindsWhatWasThere) {
  std::fill(host, host + kCount, -1.0f);
  fill_on(a, x, 3);
  ASSERT_EQ(cudaMemcpyAsync(host, x, kBytes, cudaMemcpyDeviceToHost, a),
            cudaSuccess);
  EXPECT_THAT(std::vector<float>(host, host + kCount), Each(-1.0f));
  ASSERT_EQ(cudaStreamSynchronize(a), cudaSuccess);
  EXPECT_THAT(std::vector<float>(host, host + kCount), Each(3.0f));
}

TEST_P(Streams, PinnedMemoryIsReadLateAndPageableAtOnce) {
  std::fill(host, host + kCount, 1.0f);
  std::vector<float> pageable(kCount, 1.0f);
  ASSERT_EQ(cudaMemcpyAsync(x, host, kBytes, cudaMemcpyHostToDevice, a),
            cudaSuccess);
  ASSERT_EQ(
      cudaMemcpyAsync(y, pageable.data(), kBytes, cudaMemcpyHostToDevice, a),
      cudaSuccess);
  std::fill(host, host + kCount, 2.0f);
  std::fill(pageable.begin(), pageable.end(), 2.0f);
  ASSERT_EQ(cudaStreamSynchronize(a), cudaSuccess);
  EXPECT_THAT(read_after(a, x), Each(2.0f));
  EXPECT_THAT(read_after(a, y), Each(1.0f));
}

TEST_P(Streams, QueriesSayNotReadyFirstAndEndWithTheWorkDone) {
  fill_on(a, x, 3);
  ASSERT_EQ(cudaEventRecord(event, a), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(event), cudaErrorNotReady);
  EXPECT_EQ(cudaStreamQuery(a), cudaErrorNotReady);
  while (cudaEventQuery(event) == cudaErrorNotReady) {
  }
  EXPECT_EQ(cudaStreamQuery(a), cudaSuccess);
}

TEST_P(Streams, TimesOfEventsFollowTheStream) {
  cudaEvent_t later;
  ASSERT_EQ(cudaEventCreate(&later), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(event, a), cudaSuccess);
  fill_on(a, x, 3);
  ASSERT_EQ(cudaEventRecord(later, a), cudaSuccess);
  float milliseconds = -1;
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, event, later),
            cudaErrorNotReady);
  ASSERT_EQ(cudaEventSynchronize(later), cudaSuccess);
  ASSERT_EQ(cudaEventElapsedTime(&milliseconds, event, later), cudaSuccess);
  EXPECT_GT(milliseconds, 0);
  EXPECT_EQ(cudaEventDestroy(later), cudaSuccess);
}

TEST_P(Streams, MisuseIsAnError) {
  EXPECT_EQ(cudaStreamWaitEvent(b, event), cudaErrorInvalidValue);
  EXPECT_THAT(cudaGetErrorString(cudaErrorInvalidValue),
              HasSubstr("the event was never recorded"));
  EXPECT_EQ(cudaMemcpyAsync(x, host, kBytes + 4, cudaMemcpyHostToDevice, a),
            cudaErrorInvalidValue);
  EXPECT_THAT(cudaGetErrorString(cudaErrorInvalidValue),
              HasSubstr("of 164 bytes, 0 bytes into the 160 bytes"));
  EXPECT_EQ(cudaMemcpyAsync(x, host, kBytes, cudaMemcpyDeviceToHost, a),
            cudaErrorInvalidValue);
  // Work that still uses pinned memory.
  float* other = nullptr;
  ASSERT_EQ(cudaHostAlloc(&other, kBytes, 0), cudaSuccess);
  ASSERT_EQ(cudaMemcpyAsync(other, x, kBytes, cudaMemcpyDeviceToHost, a),
            cudaSuccess);
  EXPECT_EQ(cudaFreeHost(other), cudaErrorInvalidValue);
  EXPECT_THAT(cudaGetErrorString(cudaErrorInvalidValue),
              HasSubstr("cudaMemcpyAsync of 160 bytes on stream"));
  ASSERT_EQ(cudaStreamSynchronize(a), cudaSuccess);
  EXPECT_EQ(cudaFreeHost(other), cudaSuccess);
  EXPECT_EQ(cudaFreeHost(x), cudaErrorInvalidValue);
  int local = 0;
  EXPECT_EQ(cudaFree(&local), cudaErrorInvalidValue);
  EXPECT_THAT(cudaGetErrorString(cudaErrorInvalidValue),
              HasSubstr("was not allocated"));
  cudaStream_t gone;
  ASSERT_EQ(cudaStreamCreate(&gone), cudaSuccess);
  ASSERT_EQ(cudaStreamDestroy(gone), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(gone), cudaErrorInvalidResourceHandle);
  fill_on(gone, x, 1);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidResourceHandle);
  launch("huge", 1, 2048, a, fill, x, kCount, 1.0f);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidConfiguration);
}

TEST_P(Streams, DevicesAreKeptApart) {
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  fill_on(a, x, 3);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidResourceHandle);
  EXPECT_THAT(cudaGetErrorString(cudaErrorInvalidResourceHandle),
              HasSubstr("the stream is of device 0, the thread uses device 1"));
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  EXPECT_EQ(cudaSetDevice(1000), cudaErrorInvalidDevice);
  (void)cudaGetLastError();
}

TEST_P(Streams, NullStreamWaitsForBlockingStreamsOnly) {
  cudaStream_t blocking;
  ASSERT_EQ(cudaStreamCreate(&blocking), cudaSuccess);
  fill_on(blocking, x, 5);
  std::vector<float> found(kCount);
  ASSERT_EQ(cudaMemcpy(found.data(), x, kBytes, cudaMemcpyDeviceToHost),
            cudaSuccess);
  EXPECT_THAT(found, Each(5.0f));
  EXPECT_EQ(cudaStreamDestroy(blocking), cudaSuccess);
}

TEST_P(Streams, PlantedFailureIsReturnedOnce) {
  fail_call("cudaMalloc", 2, cudaErrorMemoryAllocation);
  void* first = nullptr;
  void* second = nullptr;
  EXPECT_EQ(cudaMalloc(&first, 16), cudaSuccess);
  EXPECT_EQ(cudaMalloc(&second, 16), cudaErrorMemoryAllocation);
  EXPECT_EQ(second, nullptr);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaMalloc(&second, 16), cudaSuccess);
  EXPECT_EQ(cudaFree(first), cudaSuccess);
  EXPECT_EQ(cudaFree(second), cudaSuccess);
}

TEST_P(Streams, MemoryOfADeviceEnds) {
  set_device_memory(1 << 20);
  void* data = nullptr;
  EXPECT_EQ(cudaMalloc(&data, 2 << 20), cudaErrorMemoryAllocation);
  (void)cudaGetLastError();
  set_device_memory(std::size_t{16} << 30);
}

// A collective of two streams: neither goes on before both have come to it.
TEST_P(Streams, WorkThatWaitsForAnotherThread) {
  std::atomic<int> arrived = 0;
  const auto meet = [&](cudaStream_t stream) {
    auto mine = std::make_shared<bool>(false);
    enqueue(stream, "meet", [&arrived, mine] {
      if (!std::exchange(*mine, true)) ++arrived;
      return arrived == 2;
    });
  };
  std::thread other([&] {
    meet(b);
    fill_on(b, x, 7);
    EXPECT_EQ(cudaStreamSynchronize(b), cudaSuccess);
  });
  meet(a);
  EXPECT_EQ(cudaStreamSynchronize(a), cudaSuccess);
  other.join();
  EXPECT_THAT(read_after(a, x), Each(7.0f));
}

}  // namespace
}  // namespace emulator
