#include "comm/ledger.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>

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
  struct Case {
    CommOp op;
    int rank, root_or_peer;
    double elements;
  };
  for (const auto& [op, rank, root_or_peer, elements] :
       {Case{CommOp::kAllReduce, 0, -1, 1500},
        Case{CommOp::kReduceScatter, 0, -1, 750},
        Case{CommOp::kAllGather, 0, -1, 750},
        Case{CommOp::kBroadcast, 1, 0, 750}, Case{CommOp::kReduce, 0, 0, 750},
        Case{CommOp::kScatter, 2, 2, 750}, Case{CommOp::kScatter, 1, 2, 0},
        Case{CommOp::kGather, 0, 2, 0}, Case{CommOp::kAllToAll, 0, -1, 750},
        Case{CommOp::kSend, 0, 1, 1000}, Case{CommOp::kRecv, 0, 1, 0},
        Case{CommOp::kBarrier, 0, -1, 0}}) {
    const CommRecord each = record(op, 4, 1000, rank, root_or_peer);
    EXPECT_EQ(wire_elements(each), elements) << record_text(each);
    EXPECT_EQ(wire_bytes(each), 4 * elements);
  }
  CommRecord counts = record(CommOp::kAllToAllV, 4, 1000);
  counts.numel_to_peers = 600;
  EXPECT_EQ(wire_elements(counts), 600);
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

double bytes_of(const CommRecord& record) { return wire_bytes(record); }

// The log keeps the beginning and the end of a long run, and the sum of all.
TEST(Ledger, ALongLogIsKeptInPart) {
  const auto log_of = [](std::int64_t count) {
    CommLog log(bytes_of);
    for (std::int64_t i = 0; i < count; ++i) {
      log.add(record(CommOp::kSend, 2, i, 0, 1));
    }
    return log;
  };
  constexpr auto kKept = static_cast<std::int64_t>(CommLog::kKept);
  for (const std::int64_t count :
       {kKept, 3 * kKept, 3 * kKept + 1, 10 * kKept, 30 * kKept + 7}) {
    const CommLog log = log_of(count);
    const auto size = static_cast<std::int64_t>(log.records().size());
    EXPECT_EQ(log.num_calls(), count);
    EXPECT_EQ(log.bytes(), 4.0 * count * (count - 1) / 2);
    EXPECT_LE(size, 3 * kKept);
    if (count <= 3 * kKept) {
      EXPECT_EQ(size, count);
    }
    for (std::int64_t i = 0; i < kKept; ++i) {
      const auto at = static_cast<std::size_t>(i);
      ASSERT_EQ(log.records()[at].numel, i);
      ASSERT_EQ(log.records()[log.records().size() - 1 - at].numel,
                count - 1 - i);
    }
  }
}

TEST(Ledger, RepeatedCallsCountAsIfTheyHadBeenMade) {
  constexpr auto kKept = static_cast<std::int64_t>(CommLog::kKept);
  // A few records many times, and more than the log keeps
  for (const auto& [body, times] : {std::pair<std::int64_t, std::int64_t>(3, 5),
                                    {7, 20000},
                                    {5 * kKept, 2}}) {
    CommLog made(bytes_of), repeated(bytes_of);
    const auto add_body = [n = body](CommLog& log) {
      for (std::int64_t i = 0; i < n; ++i) {
        log.add(record(CommOp::kSend, 2, i, 0, 1));
      }
    };
    for (CommLog* log : {&made, &repeated}) {
      log->add(record(CommOp::kAllReduce, 4, 1000));
    }
    const CommLog::Mark mark = repeated.mark();
    add_body(repeated);
    repeated.repeat(mark, times);
    for (std::int64_t k = 0; k <= times; ++k) add_body(made);
    EXPECT_EQ(repeated.num_calls(), made.num_calls());
    EXPECT_EQ(repeated.bytes(), made.bytes());
    EXPECT_LE(repeated.records().size(), 3 * CommLog::kKept);
    const std::size_t last =
        std::min(CommLog::kKept, repeated.records().size());
    for (std::size_t i = 1; i <= last; ++i) {
      const auto& a = repeated.records()[repeated.records().size() - i];
      const auto& b = made.records()[made.records().size() - i];
      ASSERT_EQ(a.numel, b.numel) << i;
    }
  }
}

}  // namespace
}  // namespace shardbook
