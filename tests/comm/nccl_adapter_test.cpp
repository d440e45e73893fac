// The code that calls NCCL, as far as one rank on a single GPU can go. The same
// source runs on a real GPU and on the emulated one.

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/nccl/nccl_library.h"
#include "core/check.h"
#include "core/context.h"
#include "core/internal/cuda_device.h"
#include "core/internal/device_runtime.h"
#include "core/tensor.h"
#include "tests/support/dtypes.h"
#include "tests/support/errors.h"

namespace shardbook::internal {
namespace {

constexpr std::int64_t kCount = 1009;
using Communicator = std::shared_ptr<NcclCommunicator>;

// Returns once NCCL has accepted the call.
void settle(const Communicator& communicator) {
  while (!communicator->is_ready()) {
  }
}

class NcclAdapter : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const std::string& reason : {why_no_cuda(), why_no_nccl()}) {
      if (!reason.empty()) GTEST_SKIP() << reason;
    }
    gpu_ = Device::cuda(0);
    cuda_runtime().use(0);
  }

  Communicator join() const {
    Communicator result = nccl_library().join(nccl_library().make_id(), 1, 0);
    settle(result);
    return result;
  }

  // Whether values of this type survive a call of the rank with itself.
  bool moves(const Communicator& communicator, CommOp op, DType dtype,
             ReduceOp reduce_op = ReduceOp::kSum) {
    const bool in_place = op == CommOp::kReduce || op == CommOp::kBroadcast;
    return moves(communicator, dtype, in_place, [&](NcclOperation operation) {
      operation.op = op;
      operation.reduce_op = reduce_op;
      communicator->call(operation, stream());
    });
  }
  template <typename Call>
  bool moves(const Communicator& communicator, DType dtype, bool in_place,
             const Call& call) {
    std::vector<double> values(kCount);
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = static_cast<double>(i * 7 % 17) - 8;
    }
    const Tensor input = Tensor::empty({kCount}, {dtype, gpu_});
    const Tensor output =
        in_place ? input : Tensor::zeros({kCount}, {dtype, gpu_});
    input.copy_from(Tensor::from_values<double>(values, {kCount}));
    NcclOperation operation{CommOp::kBarrier};
    operation.input = input.raw(), operation.output = output.raw();
    operation.count = static_cast<std::size_t>(kCount);
    operation.dtype = dtype;
    operation.peer = 0;
    call(operation);
    settle(communicator);
    return output.to_vector<double>() == values;
  }
  // The stream of the copies to and from the GPU: calls run between them.
  void* stream() const {
    return cuda_device(gpu_).stream(RankContext::current().stream);
  }

  Device gpu_;
};

TEST_F(NcclAdapter, ARankAloneReducesToItself) {
  const Communicator nccl = join();
  for (const CommOp op :
       {CommOp::kAllReduce, CommOp::kReduceScatter, CommOp::kReduce}) {
    for (const DType dtype : kAllDTypes) {
      for (const ReduceOp reduce_op :
           {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin}) {
        EXPECT_TRUE(moves(nccl, op, dtype, reduce_op))
            << comm_op_name(op) << " " << dtype_name(dtype);
      }
    }
  }
}

TEST_F(NcclAdapter, ARankAloneGathersAndBroadcasts) {
  const Communicator nccl = join();
  for (const CommOp op : {CommOp::kAllGather, CommOp::kBroadcast}) {
    for (const DType dtype : kAllDTypes) {
      EXPECT_TRUE(moves(nccl, op, dtype))
          << comm_op_name(op) << " " << dtype_name(dtype);
    }
  }
}

TEST_F(NcclAdapter, AGroupOfCallsLetsARankSendToItself) {
  const Communicator nccl = join();
  for (const DType dtype : kAllDTypes) {
    EXPECT_TRUE(moves(nccl, dtype, false, [&](NcclOperation operation) {
      nccl_library().begin_group();
      for (const CommOp op : {CommOp::kSend, CommOp::kRecv}) {
        operation.op = op;
        nccl->call(operation, stream());
      }
      nccl_library().end_group();
    })) << dtype_name(dtype);
  }
}

TEST_F(NcclAdapter, APartOfACommunicatorWorksLikeTheWhole) {
  const Communicator nccl = join();
  const Communicator part = nccl->split(/*color=*/3, /*key=*/0);
  settle(part);
  for (const Communicator& each : {part, nccl}) {
    EXPECT_TRUE(moves(each, CommOp::kAllGather, DType::kF32));
  }
}

TEST_F(NcclAdapter, CommunicatorsEndTogetherAndOthersBegin) {
  for (int round = 0; round < 2; ++round) {
    std::vector<Communicator> all = {join(), join()};
    all.push_back(all[0]->split(0, 0));
    settle(all[2]);
    for (const Communicator& each : all) {
      EXPECT_TRUE(moves(each, CommOp::kAllReduce, DType::kI32));
    }
    for (const Communicator& each : all) each->finalize();
    for (const Communicator& each : all) settle(each);
  }
}

TEST_F(NcclAdapter, AnAbortEndsCallsInFlight) {
  const Communicator nccl = join();
  const Tensor x = Tensor::zeros({1 << 20}, {DType::kF32, gpu_});
  void* const data = x.raw();
  for (int i = 0; i < 8; ++i) {
    nccl->call({CommOp::kAllReduce, data, data, 1 << 20}, stream());
    settle(nccl);
  }
  nccl_library().begin_group();
  nccl->abort();
  nccl_library().end_group();
  cuda_runtime().synchronize_stream(stream());
  EXPECT_THROW(nccl->is_ready(), Error);
  // The GPU can be used by another communicator.
  const Communicator next = join();
  EXPECT_TRUE(moves(next, CommOp::kAllReduce, DType::kF32));
}

TEST_F(NcclAdapter, ARefusedCallNamesItsSize) {
  const Communicator nccl = join();
  const Tensor x = Tensor::zeros({4}, {DType::kF32, gpu_});
  NcclOperation send{CommOp::kSend, x.raw(), nullptr, 4};
  send.peer = 5;
  expect_error([&] { nccl->call(send, stream()); },
               {"NCCL: ncclSend of f32[4] to rank 5 failed: invalid argument"});
  nccl->abort();
}

}  // namespace
}  // namespace shardbook::internal
