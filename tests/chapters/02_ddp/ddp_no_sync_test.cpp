// Accumulation of gradients under no_sync, and scopes in the wrong place.

#include <gtest/gtest.h>

#include <optional>

#include "tests/chapters/02_ddp/ddp_reducer_support.h"

namespace shardbook::ddp_test {
namespace {

using ddp::DdpOptions;
using ddp::DistributedDataParallel;

struct Accumulated {
  Values grads;
  Numels log;
};

/// Three pieces of this rank's samples under `step`.
template <typename Step>
Accumulated accumulate(const DdpOptions& options, Step step) {
  return on_ranks(2, [&](ProcessGroup& world) {
    Replica<Mlp> r(world, options, 12);
    world.clear_records();
    for (int i = 0; i < 3; ++i) step(r.ddp, every(r.mine, i, 3), i);
    return Accumulated{grads_of(r.model),
                       numels(records_of(world, CommOp::kAllReduce))};
  })[0];
}

TEST(DdpNoSync, AccumulationSendsWhatOneStepSends) {
  for (const bool view : {false, true}) {
    DdpOptions options = tiny_buckets(100);
    options.gradient_as_bucket_view = view;
    const Accumulated result = accumulate(
        options, [](DistributedDataParallel& ddp, const Samples& s, int i) {
          std::optional<ddp::NoSync> no_sync;
          if (i < 2) no_sync.emplace(ddp);
          scale(mse_loss(ddp(s.x), s.y), 1.0 / 3).backward();
        });
    EXPECT_EQ(result.log, (Numels{3, 24, 49, 35}));
    EXPECT_LT(largest_difference(result.grads, one_device_grads<Mlp>(12)),
              1e-12);
  }
}

TEST(DdpNoSync, ScopesNest) {
  on_ranks(2, [](ProcessGroup& world) {
    Replica<Mlp> r(world);
    world.clear_records();
    auto outer = r.ddp.no_sync();
    { auto inner = r.ddp.no_sync(); }
    r.backward();
    EXPECT_TRUE(world.records().empty());
  });
}

TEST(DdpTrap, NoSyncAroundBackwardAloneStillReducesEveryTime) {
  const Accumulated result =
      accumulate({}, [](DistributedDataParallel& ddp, const Samples& s, int i) {
        const Tensor loss = scale(mse_loss(ddp(s.x), s.y), 1.0 / 3);
        auto no_sync = ddp.no_sync();
        loss.backward();
      });
  // Three times the traffic. The result is still right: a sum that is equal on
  // all ranks is its own mean.
  EXPECT_EQ(result.log, (Numels(3, 111)));
  EXPECT_LT(largest_difference(result.grads, one_device_grads<Mlp>(12)), 1e-12);
}

TEST(DdpTrap, NoSyncAroundForwardAloneNeverReduces) {
  const Accumulated result =
      accumulate({}, [](DistributedDataParallel& ddp, const Samples& s, int i) {
        Tensor loss;
        {
          auto no_sync = ddp.no_sync();
          loss = scale(mse_loss(ddp(s.x), s.y), 1.0 / 3);
        }
        loss.backward();
      });
  EXPECT_TRUE(result.log.empty());
  EXPECT_GT(largest_difference(result.grads, one_device_grads<Mlp>(12)), 1e-3);
}

}  // namespace
}  // namespace shardbook::ddp_test
