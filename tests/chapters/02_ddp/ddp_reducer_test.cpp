// The reducer: the messages, their times and order, and the hook used.

#include <gtest/gtest.h>

#include "chapters/common/run/trace.h"
#include "tests/chapters/02_ddp/ddp_reducer_support.h"
#include "tests/support/errors.h"

namespace shardbook::ddp_test {
namespace {

using ddp::BucketMembers;
using ddp::DdpOptions;
using ddp::DistributedDataParallel;

// --- The ledger --------------------------------------------------------------

TEST(DdpLedger, AThousandFloatsOnFourRanksSendSixThousandBytes) {
  const auto sent = on_ranks(4, [](ProcessGroup& world) {
    Linear model("0", 10, 100, init_of(DType::kF32), /*with_bias=*/false);
    DistributedDataParallel ddp(model, world);
    world.clear_records();
    sum(ddp(Tensor::full({2, 10}, world.rank()))).backward();
    EXPECT_EQ(world.records().size(), 1u);
    return wire_bytes(world.records());
  });
  EXPECT_EQ(sent, (std::vector<double>(4, 6000.0)));
}

TEST(DdpLedger, EachStepReducesEveryBucketOnceInTheSameOrder) {
  const auto logs = on_ranks(3, [](ProcessGroup& world) {
    Replica<Mlp32> r(world, tiny_buckets(100), 6);
    std::vector<Numels> log;
    for (int step = 0; step < 3; ++step) {
      world.clear_records();
      r.backward();
      log.push_back(numels(records_of(world, CommOp::kAllReduce)));
      Numels sizes;
      for (const BucketMembers& bucket : r.ddp.reducer().buckets()) {
        std::int64_t size = 0;
        for (const int i : bucket) {
          size += r.model.parameters()[static_cast<std::size_t>(i)].numel();
        }
        sizes.push_back(size);
      }
      EXPECT_EQ(log.back(), sizes);
      r.model.clear_grad();
    }
    return log;
  });
  for (const auto& log : logs) {
    EXPECT_EQ(log, logs[0]);
    for (const Numels& step : log) {
      std::int64_t total = 0;
      for (const std::int64_t n : step) total += n;
      EXPECT_EQ(total, 111);
    }
  }
  // A bucket closes at 100 bytes, 25 floats: 35 | 7 42 | 6 18 3, reversed.
  EXPECT_EQ(logs[0][0], (Numels{27, 49, 35}));
}

TEST(DdpLedger, ConstructionBroadcastsTheWeightsOnce) {
  on_ranks(2, [](ProcessGroup& world) {
    const Replica<Mlp32> r(world);
    EXPECT_EQ(numels(world.records()), (Numels{111}));
    EXPECT_EQ(world.records()[0].op, CommOp::kBroadcast);
  });
}

TEST(DdpLedger, GroupsOfOneSendNothing) {
  on_ranks(1, [](ProcessGroup& world) {
    DdpOptions options = tiny_buckets();
    options.find_unused_parameters = true;
    Replica<Mlp32> r(world, options);
    for (int step = 0; step < 2; ++step) r.backward();
    EXPECT_TRUE(world.records().empty());
  });
}

// --- Overlap -----------------------------------------------------------------

/// Backward operations that begin after the first bucket was sent, without
/// copies of results out of the buckets.
std::int64_t backward_ops_after_first_bucket(const DdpOptions& options) {
  return on_ranks(2, [&](ProcessGroup& world) {
    Replica<Mlp32> r(world, options, 8);
    r.backward();  // and the buckets are rebuilt
    r.model.clear_grad();
    const auto trace = std::make_shared<Trace>(world.rank());
    RankContext::current().add_observer(trace);
    world.set_observer(trace);
    r.backward();
    RankContext::current().remove_observer(trace);
    world.set_observer(nullptr);
    std::int64_t later = -1;
    const sim::RankTimeline seen = trace->timeline();
    for (const sim::TimelineEvent& event : seen.events) {
      if (event.name == "all_reduce bucket 0") later = 0;
      if (later >= 0 && event.category == "backward" && event.name != "copy") {
        later += 1;
      }
    }
    return later;
  })[0];
}

TEST(DdpOverlap, TheFirstBucketLeavesBeforeTheLastBackwardOperation) {
  EXPECT_GT(backward_ops_after_first_bucket(tiny_buckets()), 4);
}

TEST(DdpOverlap, OneBucketForEverythingLeavesAfterBackward) {
  EXPECT_EQ(backward_ops_after_first_bucket({}), 0);
}

// --- The order of buckets ----------------------------------------------------

TEST(DdpOrder, RebuiltBucketsFollowTheArrivalOnRankZero) {
  // Backward first reaches the branch that was added last.
  const auto ranks = on_ranks(2, [](ProcessGroup& world) {
    Replica<Branches> r(world, tiny_buckets());
    r.model.use = world.rank() == 0 ? "ba" : "ab";
    const auto before = r.ddp.reducer().buckets();
    EXPECT_EQ(before, (std::vector<BucketMembers>{{3}, {2}, {1}, {0}}));
    for (const bool has_rebuilt : {false, true, true}) {
      r.model.clear_grad();
      r.backward();
      EXPECT_EQ(r.ddp.reducer().has_rebuilt(), has_rebuilt);
    }
    EXPECT_EQ(records_of(world, CommOp::kBroadcast, "bucket order").size(), 1u);
    return std::pair(r.ddp.reducer().buckets(), grads_of(r.model));
  });
  EXPECT_EQ(ranks[0], ranks[1]);
  // Branch a (parameters 0 and 1) came first on rank 0.
  const auto& [buckets, grads] = ranks[0];
  EXPECT_LT(buckets[0][0], 2);
  EXPECT_LT(buckets[1][0], 2);
  EXPECT_LT(largest_difference(grads, one_device_grads<Branches>(4)), 1e-12);
}

// --- Hooks -------------------------------------------------------------------

std::vector<Values> grads_with_hook(const ddp::CommHook& hook, DType on_wire) {
  return on_ranks(3, [&](ProcessGroup& world) {
    Replica<Mlp32> r(world, tiny_buckets(100), 6);
    if (hook) r.ddp.register_comm_hook(hook);
    for (int step = 0; step < 2; ++step) {
      r.model.clear_grad();
      world.clear_records();
      r.backward();
      for (const CommRecord& record : records_of(world, CommOp::kAllReduce)) {
        EXPECT_EQ(record.dtype, on_wire);
      }
    }
    return grads_of(r.model);
  });
}

TEST(DdpHook, CompressionHalvesTheBytesAndRoundsToBf16) {
  const auto plain = grads_with_hook(nullptr, DType::kF32);
  const auto small = grads_with_hook(ddp::bf16_compress_hook(), DType::kBF16);
  EXPECT_EQ(small[0], small[2]);
  EXPECT_LT(largest_difference(small[0], plain[0]), 0.02);
  EXPECT_NE(small[0], plain[0]);
}

TEST(DdpHook, RegisteringAfterAForwardIsRefused) {
  const std::string error = error_on_ranks(1, [](ProcessGroup& world) {
    Replica<Mlp32> r(world);
    r.loss();
    r.ddp.register_comm_hook(ddp::bf16_compress_hook());
  });
  expect_text(error, {"register it before"});
}

}  // namespace
}  // namespace shardbook::ddp_test
