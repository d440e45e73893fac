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

class Streams : public OnTwoStreams {
 protected:
  void fill_on(cudaStream_t stream, float* to, float value) {
    launch("fill", 1, 32, stream, fill, to, kCount, value);
  }
  void copy_on(cudaStream_t stream, const float* from, float* to) {
    launch("copy", 1, 32, stream, copy, from, to, kCount);
  }
  std::vector<float> read_after(cudaStream_t stream, const float* from) {
    ok(cudaMemcpyAsync(host, from, kBytes, cudaMemcpyDeviceToHost, stream));
    ok(cudaStreamSynchronize(stream));
    return std::vector<float>(host, host + kCount);
  }

  const OwnEvent event;
  const Device<float> new_x{kCount}, new_y{kCount};
  float *const x = new_x.data(), *const y = new_y.data();
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
  ok(cudaEventRecord(event, a));
  ok(cudaStreamWaitEvent(b, event));
  fill_on(a, x, 4);  // does not belong to the event, and runs later
  copy_on(b, x, y);
  EXPECT_THAT(read_after(b, y), Each(testing::AnyOf(3.0f, 4.0f)));
  EXPECT_THAT(read_after(a, x), Each(4.0f));
}

TEST_P(InOrder, WorkAfterTheEventIsNotWaitedFor) {
  fill_on(a, x, 3);
  ok(cudaEventRecord(event, a));
  ok(cudaStreamWaitEvent(b, event));
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
    const OwnStream a, b;
    launch("copy", 1, 32, b, copy, x.data(), y.data(), 40);
    launch("fill", 1, 32, a, fill, x.data(), 40, 2.0f);
    ok(cudaStreamSynchronize(b));
    stale += y.values()[0] == 2.0f;
  }
  set_seed(0);
  EXPECT_GT(stale, 0);
  EXPECT_LT(stale, 38);
}

TEST_P(InOrder, HostThatReadsTooEarlyFindsWhatWasThere) {
  std::fill(host, host + kCount, -1.0f);
  fill_on(a, x, 3);
  ok(cudaMemcpyAsync(host, x, kBytes, cudaMemcpyDeviceToHost, a));
  EXPECT_THAT(std::vector<float>(host, host + kCount), Each(-1.0f));
  ok(cudaStreamSynchronize(a));
  EXPECT_THAT(std::vector<float>(host, host + kCount), Each(3.0f));
}

TEST_P(Streams, PinnedMemoryIsReadLateAndPageableAtOnce) {
  std::fill(host, host + kCount, 1.0f);
  std::vector<float> pageable(kCount, 1.0f);
  ok(cudaMemcpyAsync(x, host, kBytes, cudaMemcpyHostToDevice, a));
  ok(cudaMemcpyAsync(y, pageable.data(), kBytes, cudaMemcpyHostToDevice, a));
  std::fill(host, host + kCount, 2.0f);
  std::fill(pageable.begin(), pageable.end(), 2.0f);
  ok(cudaStreamSynchronize(a));
  EXPECT_THAT(read_after(a, x), Each(2.0f));
  EXPECT_THAT(read_after(a, y), Each(1.0f));
}

TEST_P(Streams, QueriesSayNotReadyFirstAndEndWithTheWorkDone) {
  fill_on(a, x, 3);
  ok(cudaEventRecord(event, a));
  EXPECT_EQ(cudaEventQuery(event), cudaErrorNotReady);
  EXPECT_EQ(cudaStreamQuery(a), cudaErrorNotReady);
  while (cudaEventQuery(event) == cudaErrorNotReady) {
  }
  ok(cudaStreamQuery(a));
}

TEST_P(Streams, TimesOfEventsFollowTheStream) {
  const OwnEvent later;
  ok(cudaEventRecord(event, a));
  fill_on(a, x, 3);
  ok(cudaEventRecord(later, a));
  float milliseconds = -1;
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, event, later),
            cudaErrorNotReady);
  ok(cudaEventSynchronize(later));
  ok(cudaEventElapsedTime(&milliseconds, event, later));
  EXPECT_GT(milliseconds, 0);
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
  ok(cudaHostAlloc(&other, kBytes, 0));
  ok(cudaMemcpyAsync(other, x, kBytes, cudaMemcpyDeviceToHost, a));
  EXPECT_EQ(cudaFreeHost(other), cudaErrorInvalidValue);
  EXPECT_THAT(cudaGetErrorString(cudaErrorInvalidValue),
              HasSubstr("cudaMemcpyAsync of 160 bytes on stream"));
  ok(cudaStreamSynchronize(a));
  ok(cudaFreeHost(other));
  EXPECT_EQ(cudaFreeHost(x), cudaErrorInvalidValue);
  int local = 0;
  EXPECT_EQ(cudaFree(&local), cudaErrorInvalidValue);
  EXPECT_THAT(cudaGetErrorString(cudaErrorInvalidValue),
              HasSubstr("was not allocated"));
  cudaStream_t gone;
  ok(cudaStreamCreate(&gone));
  ok(cudaStreamDestroy(gone));
  EXPECT_EQ(cudaStreamSynchronize(gone), cudaErrorInvalidResourceHandle);
  fill_on(gone, x, 1);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidResourceHandle);
  launch("huge", 1, 2048, a, fill, x, kCount, 1.0f);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidConfiguration);
}

TEST_P(Streams, DevicesAreKeptApart) {
  ok(cudaSetDevice(1));
  fill_on(a, x, 3);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidResourceHandle);
  EXPECT_THAT(cudaGetErrorString(cudaErrorInvalidResourceHandle),
              HasSubstr("the stream is of device 0, the thread uses device 1"));
  ok(cudaSetDevice(0));
  EXPECT_EQ(cudaSetDevice(1000), cudaErrorInvalidDevice);
  (void)cudaGetLastError();
}

TEST_P(Streams, NullStreamWaitsForBlockingStreamsOnly) {
  const OwnStream blocking(cudaStreamDefault);
  fill_on(blocking, x, 5);
  std::vector<float> found(kCount);
  ok(cudaMemcpy(found.data(), x, kBytes, cudaMemcpyDeviceToHost));
  EXPECT_THAT(found, Each(5.0f));
}

TEST_P(Streams, PlantedFailureIsReturnedOnce) {
  fail_call("cudaMalloc", 2, cudaErrorMemoryAllocation);
  void* first = nullptr;
  void* second = nullptr;
  ok(cudaMalloc(&first, 16));
  EXPECT_EQ(cudaMalloc(&second, 16), cudaErrorMemoryAllocation);
  EXPECT_EQ(second, nullptr);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  ok(cudaMalloc(&second, 16));
  ok(cudaFree(first));
  ok(cudaFree(second));
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
    ok(cudaStreamSynchronize(b));
  });
  meet(a);
  ok(cudaStreamSynchronize(a));
  other.join();
  EXPECT_THAT(read_after(a, x), Each(7.0f));
}

}  // namespace
}  // namespace emulator
