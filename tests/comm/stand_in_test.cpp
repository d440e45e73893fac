// The stand-in for NCCL detects calls that would hang in NCCL.

#include <gtest/gtest.h>

#include <cstring>

#include "tests/cuda/emulator/emulator.h"
#include "tests/cuda/stand_in/stand_in.h"

namespace {

// Two ranks on two devices, driven by one thread.
class StandIn : public ::testing::Test {
 protected:
  void SetUp() override {
    emulator::set_seed(0);
    ncclUniqueId id;
    ncclGetUniqueId(&id);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    for (int r = 0; r < 2; ++r) {
      cudaSetDevice(r);
      cudaStreamCreateWithFlags(&stream_[r], cudaStreamNonBlocking);
      cudaMalloc(&data_[r], 8);
      cudaMalloc(&other_[r], 8);
      const float value = static_cast<float>(r + 1);
      cudaMemcpy(data_[r], &value, sizeof(value), cudaMemcpyHostToDevice);
      ASSERT_EQ(ncclCommInitRankConfig(&comm_[r], 2, id, r, &config),
                ncclInProgress);
    }
    EXPECT_EQ(state(0), ncclSuccess);
    EXPECT_EQ(state(1), ncclSuccess);
  }
  void TearDown() override {
    for (int r = 0; r < 2; ++r) {
      if (comm_[r] != nullptr) ncclCommAbort(comm_[r]);
      cudaSetDevice(r);
      cudaStreamSynchronize(stream_[r]);
      cudaStreamDestroy(stream_[r]);
      cudaFree(data_[r]);
      cudaFree(other_[r]);
    }
    cudaSetDevice(0);
  }
  ncclResult_t state(int rank) {
    ncclResult_t result = ncclSuccess;
    ncclCommGetAsyncError(comm_[rank], &result);
    return result;
  }
  // Polls until the launch has reached its stream.
  void settle(int rank) {
    while (state(rank) == ncclInProgress) {
    }
  }
  float value(const void* data) {
    float result = 0;
    cudaMemcpy(&result, data, sizeof(result), cudaMemcpyDeviceToHost);
    return result;
  }

  ncclComm_t comm_[2] = {};
  cudaStream_t stream_[2] = {};
  void* data_[2] = {};
  void* other_[2] = {};
};

TEST_F(StandIn, ACollectiveRunsWhenAllRanksHaveCalled) {
  for (int r = 0; r < 2; ++r) {
    EXPECT_EQ(ncclAllReduce(data_[r], data_[r], 1, ncclFloat32, ncclSum,
                            comm_[r], stream_[r]),
              ncclInProgress);
    settle(r);
  }
  cudaStreamSynchronize(stream_[0]);
  cudaStreamSynchronize(stream_[1]);
  EXPECT_EQ(value(data_[0]), 3);
  EXPECT_EQ(value(data_[1]), 3);
}

TEST_F(StandIn, SecondCallIsRefusedWhileTheFirstIsInProgress) {
  const auto call = [&] {
    return ncclAllReduce(data_[0], data_[0], 1, ncclFloat32, ncclSum, comm_[0],
                         stream_[0]);
  };
  EXPECT_EQ(call(), ncclInProgress);
  EXPECT_EQ(call(), ncclInvalidUsage);
  settle(0);
  EXPECT_EQ(call(), ncclInProgress);
}

TEST_F(StandIn, CollectivesThatDifferNameBothRanks) {
  for (int r = 0; r < 2; ++r) {
    ncclAllReduce(data_[r], data_[r], 1, ncclFloat32,
                  r == 0 ? ncclSum : ncclMax, comm_[r], stream_[r]);
    settle(r);
  }
  for (int query = 0; query < 4; ++query) {
    cudaStreamQuery(stream_[0]);
    cudaStreamQuery(stream_[1]);
  }
  EXPECT_EQ(state(0), ncclInvalidUsage);
  EXPECT_STREQ(ncclGetLastError(comm_[0]),
               "calls differ: rank 0 called ncclAllReduce f32[1] (sum), rank 1 "
               "called ncclAllReduce f32[1] (max)");
}

// Each rank sends before it receives: only a group lets both run.
TEST_F(StandIn, MessagesOfAGroupRunTogether) {
  for (const bool grouped : {true, false}) {
    for (int r = 0; r < 2; ++r) {
      if (grouped) ncclGroupStart();
      ncclSend(data_[r], 1, ncclFloat32, 1 - r, comm_[r], stream_[r]);
      if (!grouped) settle(r);
      ncclRecv(other_[r], 1, ncclFloat32, 1 - r, comm_[r], stream_[r]);
      if (grouped) ncclGroupEnd();
      settle(r);
    }
    for (int query = 0; query < 8; ++query) {
      cudaStreamQuery(stream_[0]);
      cudaStreamQuery(stream_[1]);
    }
    const bool is_done = cudaStreamQuery(stream_[0]) == cudaSuccess;
    EXPECT_EQ(is_done, grouped);
    if (grouped) {
      EXPECT_EQ(value(other_[0]), 2);
      EXPECT_EQ(value(other_[1]), 1);
    }
  }
}

}  // namespace
