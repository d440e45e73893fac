#include "comm/ledger.h"

#include <gtest/gtest.h>

namespace shardbook {
namespace {

CommRecord record(CommOp op, int group_size, std::int64_t numel,
                  int group_rank = 0, int root_or_peer = -1) {
  CommRecord result;
  result.op = op;
  result.group = "dp";
  result.group_size = group_size;
  result.group_rank = group_rank;
  result.numel = numel;
  result.root_or_peer = root_or_peer;
  return result;
}

TEST(Ledger, WireElementsFollowTheModel) {
  EXPECT_EQ(wire_elements(record(CommOp::kAllReduce, 4, 1000)), 1500);
  EXPECT_EQ(wire_elements(record(CommOp::kReduceScatter, 4, 1000)), 750);
  EXPECT_EQ(wire_elements(record(CommOp::kAllGather, 4, 1000)), 750);
  EXPECT_EQ(wire_elements(record(CommOp::kBroadcast, 4, 1000, 1, 0)), 750);
  EXPECT_EQ(wire_elements(record(CommOp::kReduce, 4, 1000, 0, 0)), 750);
  EXPECT_EQ(wire_elements(record(CommOp::kScatter, 4, 1000, 2, 2)), 750);
  EXPECT_EQ(wire_elements(record(CommOp::kScatter, 4, 1000, 1, 2)), 0);
  EXPECT_EQ(wire_elements(record(CommOp::kGather, 4, 1000, 0, 2)), 0);
  EXPECT_EQ(wire_elements(record(CommOp::kAllToAll, 4, 1000)), 750);
  EXPECT_EQ(wire_elements(record(CommOp::kSend, 4, 1000, 0, 1)), 1000);
  EXPECT_EQ(wire_elements(record(CommOp::kRecv, 4, 1000, 0, 1)), 0);
  EXPECT_EQ(wire_elements(record(CommOp::kBarrier, 4, 0)), 0);
  CommRecord counts = record(CommOp::kAllToAllV, 4, 1000);
  counts.numel_to_peers = 600;
  EXPECT_EQ(wire_elements(counts), 600);
}

TEST(Ledger, DdpOfAThousandParametersOverFourRanksSendsSixThousandBytes) {
  EXPECT_EQ(wire_bytes(record(CommOp::kAllReduce, 4, 1000)), 6000);
}

TEST(Ledger, AnAllReduceIsAReduceScatterAndAnAllGather) {
  for (int group_size : {2, 3, 7}) {
    for (std::int64_t numel : {0, 1, 210, 1001}) {
      EXPECT_DOUBLE_EQ(
          wire_elements(record(CommOp::kAllReduce, group_size, numel)),
          wire_elements(record(CommOp::kReduceScatter, group_size, numel)) +
              wire_elements(record(CommOp::kAllGather, group_size, numel)));
    }
  }
}

TEST(Ledger, BytesDependOnTheElementType) {
  CommRecord half = record(CommOp::kSend, 2, 10);
  half.dtype = DType::kBF16;
  CommRecord index = record(CommOp::kSend, 2, 10);
  index.dtype = DType::kI64;
  EXPECT_EQ(wire_bytes(half), 20);
  EXPECT_EQ(wire_bytes(index), 80);
  EXPECT_EQ(wire_bytes(std::vector<CommRecord>{half, index}), 100);
}

TEST(Ledger, ARecordReadsAsASentence) {
  CommRecord reduce = record(CommOp::kAllReduce, 4, 1000);
  reduce.label = "bucket 0";
  EXPECT_EQ(record_text(reduce),
            "all_reduce f32[1000] over dp (rank 0 of 4) 'bucket 0'");
}

}  // namespace
}  // namespace shardbook
