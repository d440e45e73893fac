// Kernels with one mistake each: the emulator names the mistake, the place and
// the threads.

#include <gmock/gmock.h>

#include "tests/cuda/test_support.h"

namespace emulator {
namespace {

using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;

class Faults : public OverSeeds {
 protected:
  const Device<int> out{std::vector<int>(64)};
};
INSTANTIATE_TEST_SUITE_P(Seeds, Faults, testing::Values(0, 1, 2, 3));

// Each thread gives its number to the next one. Without a barrier, the next one
// may read too early.
template <bool has_barrier>
__global__ void pass_on(int* out) {
  __shared__ SharedArray<int, 64> numbers;
  const int i = static_cast<int>(threadIdx.x);
  numbers[i] = i;
  if (has_barrier) __syncthreads();
  out[i] = numbers[(i + 1) % 64];
}

TEST_P(Faults, MissingBarrierIsCaught) {
  EXPECT_EQ(run("pass_on", 1, 64, pass_on<true>, out.data()), "");
  // Whether it reads too early or too late depends on who goes first.
  EXPECT_THAT(run("pass_on", 1, 64, pass_on<false>, out.data()),
              AllOf(HasSubstr("pass_on: block 0, thread "),
                    HasSubstr("emulator_faults_test.cpp:"),
                    AnyOf(HasSubstr("race: it reads element "),
                          HasSubstr("race: it writes element "),
                          HasSubstr("not written: it reads element "))));
}

// Two threads write the same element.
__global__ void write_twice(int* out) {
  __shared__ SharedArray<int, 32> sums;
  sums[threadIdx.x / 2] = 1;
  __syncthreads();
  out[threadIdx.x] = sums[threadIdx.x / 2];
}

TEST_P(Faults, RaceNamesBothThreadsAndTheElement) {
  const std::string text = run("write_twice", 2, 64, write_twice, out.data());
  EXPECT_THAT(text, AllOf(HasSubstr("race: it writes element "),
                          HasSubstr("which thread "),
                          HasSubstr(" wrote with no barrier in between")));
  if (GetParam() == 0) {
    EXPECT_THAT(text, AllOf(HasSubstr("block 0, thread 1: "),
                            HasSubstr("element 0 of"), HasSubstr("thread 0")));
  }
}

// A reader must be done before the next round writes.
template <bool has_barrier>
__global__ void rounds(int* out) {
  __shared__ SharedArray<int, 64> numbers;
  const int i = static_cast<int>(threadIdx.x);
  int sum = 0;
  for (int round = 0; round < 3; ++round) {
    numbers[i] = round + i;
    __syncthreads();
    sum += numbers[63 - i];
    if (has_barrier) __syncthreads();
  }
  out[i] = sum;
}

TEST_P(Faults, WritingToWhatAnotherStillReadsIsARace) {
  EXPECT_EQ(run("rounds", 1, 64, rounds<true>, out.data()), "");
  EXPECT_THAT(run("rounds", 1, 64, rounds<false>, out.data()),
              HasSubstr("race: it "));
}

// The lanes of a warp are no exception: a shuffle orders no memory.
__global__ void pass_on_in_warp(int* out) {
  __shared__ SharedArray<int, 64> numbers;
  const int i = static_cast<int>(threadIdx.x);
  numbers[i] = i;
  out[i] = __shfl_xor_sync(0xffffffffu, i, 1);
  out[i] = numbers[i ^ 1];
}

TEST_P(Faults, ShuffleOrdersNoMemory) {
  EXPECT_THAT(run("warp", 1, 64, pass_on_in_warp, out.data()),
              HasSubstr("race: it reads element "));
}

__global__ void read_unwritten(int* out) {
  __shared__ SharedArray<int, 64> numbers;
  if (threadIdx.x < 63) numbers[threadIdx.x] = 1;
  __syncthreads();
  out[threadIdx.x] = numbers[threadIdx.x];
}

TEST_P(Faults, ReadOfWhatNobodyWroteIsCaught) {
  EXPECT_THAT(run("unwritten", 3, 64, read_unwritten, out.data()),
              AllOf(HasSubstr("thread 63: not written: it reads element 63"),
                    HasSubstr("no thread of the block has written")));
}

__global__ void index_outside(int* out, int index) {
  __shared__ SharedArray<int, 64> numbers;
  numbers[threadIdx.x] = 1;
  if (threadIdx.x == 5) numbers[index] = 2;
  out[threadIdx.x] = 0;
}

TEST_P(Faults, IndexOutsideSharedArrayIsCaught) {
  for (const int index : {64, -1}) {
    EXPECT_THAT(run("outside", 1, 64, index_outside, out.data(), index),
                AllOf(HasSubstr("thread 5: index outside: element " +
                                std::to_string(index) + " of"),
                      HasSubstr("which has 64")));
  }
}

__global__ void skip_barrier(int* out) {
  if (threadIdx.x == 17) return;
  __syncthreads();
  out[threadIdx.x] = 1;
}
__global__ void different_barriers(int* out) {
  if (threadIdx.x < 17) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  out[threadIdx.x] = 1;
}

TEST_P(Faults, BarrierThatNotAllReachIsADeadlock) {
  EXPECT_THAT(run("skip", 1, 64, skip_barrier, out.data()),
              AllOf(HasSubstr("skip: block 0, thread 0: deadlock: waits at "
                              "__syncthreads() in emulator_faults_test.cpp:"),
                    HasSubstr("thread 17 does not reach: it has ended")));
  EXPECT_THAT(run("branches", 1, 64, different_barriers, out.data()),
              AllOf(HasSubstr("__syncthreads() in emulator_faults_test.cpp:"),
                    HasSubstr("waits at another in "
                              "emulator_faults_test.cpp:")));
  // What failed is forgotten.
  EXPECT_EQ(run("pass_on", 1, 64, pass_on<true>, out.data()), "");
}

__global__ void shuffle_in_branch(int* out) {
  const int i = static_cast<int>(threadIdx.x);
  if (i < 16) out[i] = __shfl_xor_sync(0xffffffffu, i, 1);
}
__global__ void shuffle_some_lanes(int* out) {
  const int i = static_cast<int>(threadIdx.x);
  if (i < 16) out[i] = __shfl_xor_sync(0x0000ffffu, i, 1);
}
__global__ void shuffle_against_barrier(int* out) {
  const int i = static_cast<int>(threadIdx.x);
  if (i == 3) {
    __syncthreads();
  } else {
    out[i] = __shfl_xor_sync(0xffffffffu, i, 1);
  }
}

TEST_P(Faults, WrongShufflesAreCaught) {
  EXPECT_THAT(run("branch", 1, 64, shuffle_in_branch, out.data()),
              AllOf(HasSubstr("deadlock: waits at __shfl_xor_sync in "),
                    HasSubstr("thread 16 does not reach: it has ended")));
  EXPECT_THAT(run("mask", 1, 64, shuffle_some_lanes, out.data()),
              HasSubstr("give the full mask"));
  EXPECT_THAT(run("barrier", 1, 32, shuffle_against_barrier, out.data()),
              AllOf(HasSubstr("deadlock: "), HasSubstr("__syncthreads()"),
                    HasSubstr("__shfl_xor_sync")));
  // The last warp of such a block has 16 lanes.
  EXPECT_THAT(run("lanes", 1, 48, shuffle_against_barrier, out.data()),
              HasSubstr("deadlock: "));
}

__global__ void write_at(float* out, int index) {
  if (threadIdx.x == 9) out[index] = 1.0f;
}
__global__ void read_at(float* out, int index) {
  if (threadIdx.x == 9) out[0] = out[index];
}

TEST_P(Faults, OverrunOfGlobalMemoryIsCaught) {
  // 64 floats end where a page ends; after 63 there is a gap of 4 bytes.
  const Device<float> whole(std::vector<float>(64));
  EXPECT_THAT(run("over", 4, 32, write_at, whole.data(), 64),
              AllOf(HasSubstr("over: block "),
                    HasSubstr("thread 9: outside: it writes 0 bytes past the "
                              "end of the 256 bytes")));
  EXPECT_THAT(run("over", 4, 32, read_at, whole.data(), 70),
              HasSubstr("thread 9: outside: it reads 24 bytes past the end"));
  const Device<float> odd(std::vector<float>(63));
  EXPECT_THAT(run("gap", 1, 32, write_at, odd.data(), 63),
              HasSubstr("gap: something was written 0 bytes past the end of "
                        "the 252 bytes"));
  EXPECT_THAT(run("under", 1, 32, write_at, odd.data(), -1),
              HasSubstr("bytes before the start of the 252 bytes"));
  EXPECT_EQ(run("right", 1, 32, write_at, odd.data(), 62), "");
}

TEST_P(Faults, FreedMemoryIsCaught) {
  float* data = nullptr;
  ok(cudaMalloc(&data, 256));
  ok(cudaFree(data));
  EXPECT_THAT(run("freed", 1, 32, write_at, data, 3),
              HasSubstr("outside: it writes 12 bytes into the 256 bytes"));
  EXPECT_EQ(cudaFree(data), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
  EXPECT_THAT(cudaGetErrorString(cudaErrorInvalidValue),
              HasSubstr("was freed before"));
}

TEST(FaultsDeathTest, HostThatTouchesDeviceMemoryIsCaught) {
  const Device<float> array(std::vector<float>(64));
  EXPECT_DEATH(array.data()[3] = 1.0f,
               "the host touches device memory, 12 bytes into the 256 bytes");
}

}  // namespace
}  // namespace emulator
