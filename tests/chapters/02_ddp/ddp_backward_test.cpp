// DDP: which backward reduces, and options that few models need.

#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <utility>

#include "chapters/02_ddp/sync_batch_norm.h"
#include "tests/chapters/02_ddp/ddp_support.h"
#include "tests/support/errors.h"

namespace shardbook::ddp_test {
namespace {

using ddp::BucketMembers;
using ddp::DdpOptions;
using ddp::DistributedDataParallel;

/// This rank's samples of one of several global batches.
Samples mine_of(const ProcessGroup& world, std::uint64_t seed) {
  return every(make_samples(12, DType::kF64, seed), world.rank(), world.size());
}

/// Gradients of the sum of the mean losses over two global batches.
Values gradients_of_two_batches() {
  Sequential model = make_mlp(DType::kF64);
  mse(model, make_samples(12, DType::kF64, 1)).backward();
  mse(model, make_samples(12, DType::kF64, 2)).backward();
  return grads_of(model);
}

std::vector<DdpOptions> ways() {
  return {{},
          {.gradient_as_bucket_view = true},
          {.find_unused_parameters = true},
          {.static_graph = true}};
}

// --- Several forwards -------------------------------------------------------

TEST(DdpForwards, TheirLossesMayShareOneBackward) {
  const Values right = gradients_of_two_batches();
  for (const DdpOptions& options : ways()) {
    const auto grads = on_ranks(3, [&](ProcessGroup& world) {
      Sequential model = make_mlp(DType::kF64);
      DistributedDataParallel ddp(model, world, options);
      for (int step = 0; step < 2; ++step) {
        model.clear_grad();
        const Samples a = mine_of(world, 1), b = mine_of(world, 2);
        const Tensor first = mse_loss(ddp(a.x), a.y);
        const Tensor second = mse_loss(ddp(b.x), b.y);
        add(first, second).backward();
      }
      return grads_of(model);
    });
    for (const Values& rank : grads) {
      EXPECT_LT(largest_difference(rank, right), 1e-12);
    }
  }
}

// The second gradient would stay on its rank, unnoticed.
TEST(DdpTrap, ASecondBackwardAfterTwoForwardsIsRefused) {
  for (const DdpOptions& options : ways()) {
    const std::string error = error_on_ranks(2, [&](ProcessGroup& world) {
      Sequential model = make_mlp(DType::kF64);
      DistributedDataParallel ddp(model, world, options);
      const Samples a = mine_of(world, 1), b = mine_of(world, 2);
      const Tensor first = mse_loss(ddp(a.x), a.y);
      const Tensor second = mse_loss(ddp(b.x), b.y);
      first.backward();
      second.backward();
    });
    expect_text(error, {"whose gradients no reduction awaits",
                        "add the losses and run one backward"});
  }
}

// A second backward through one forward, and a backward behind another forward
// under no_sync.
TEST(DdpTrap, ABackwardThatNoForwardAnnouncedIsRefused) {
  for (const bool has_other_forward : {false, true}) {
    const std::string error = error_on_ranks(2, [&](ProcessGroup& world) {
      Replica<Mlp> r(world, {}, 12, 1);
      const Tensor loss = r.loss();
      if (has_other_forward) {
        auto no_sync = r.ddp.no_sync();
        r.ddp(r.mine.x);
      } else {
        autograd::backward({loss}, {}, /*retain_graph=*/true);
      }
      loss.backward();
    });
    expect_text(error, {"no reduction awaits"});
  }
}

// Some buckets have been sent when the first layer's gradient is ready.
TEST(DdpTrap, ABackwardThatThrewIsRefusedUntilItsGradientsAreCleared) {
  const Values right = gradients_of_two_batches();
  for (DdpOptions options : ways()) {
    options.bucket_cap_mb = options.first_bucket_mb = kByte;
    const auto grads = on_ranks(2, [&](ProcessGroup& world) {
      Sequential model = make_mlp(DType::kF64);
      bool throws = true;
      model.parameters()[0].add_accumulate_hook([&](Tensor&) {
        if (std::exchange(throws, false)) SB_FAIL("backward: blown");
      });
      DistributedDataParallel ddp(model, world, options);
      const Samples a = mine_of(world, 1), b = mine_of(world, 2);
      const Tensor loss = mse_loss(ddp(a.x), a.y);
      const auto backward = [&] { autograd::backward({loss}, {}, true); };
      expect_text(error_of(backward), {"blown"});
      for (const std::string& again :
           {error_of(backward), error_of([&] { ddp(a.x); })}) {
        expect_text(again, {"after a backward that failed", "clear_grad()"});
      }
      model.clear_grad();
      mse_loss(ddp(a.x), a.y).backward();
      mse_loss(ddp(b.x), b.y).backward();
      return grads_of(model);
    });
    for (const Values& rank : grads) {
      EXPECT_LT(largest_difference(rank, right), 1e-12);
    }
  }
}

TEST(DdpForwards, EvaluationBetweenForwardAndBackwardChangesNothing) {
  const auto grads = on_ranks(2, [](ProcessGroup& world) {
    Replica<Mlp> r(world, {}, 12, 1);
    const Tensor loss = r.loss();
    {
      NoGrad no_grad;
      r.ddp(r.mine.x);
    }
    loss.backward();
    return grads_of(r.model);
  });
  EXPECT_EQ(grads[0], grads[1]);
  EXPECT_LT(largest_difference(grads[0], one_device_grads<Mlp>(12, 1)), 1e-12);
}

TEST(DdpForwards, AGraphMayOutliveDdp) {
  const auto grads = on_ranks(2, [](ProcessGroup& world) {
    std::optional<Replica<Mlp>> r(std::in_place, world);
    Sequential model = r->model;
    const Tensor loss = r->loss();
    r.reset();
    world.clear_records();
    loss.backward();
    EXPECT_TRUE(world.records().empty());
    return grads_of(model);
  });
  EXPECT_NE(grads[0], grads[1]);
}

// --- Buckets ----------------------------------------------------------------

TEST(DdpBuckets, TheFirstLimitIsAnOptionOfItsOwn) {
  // Parameters of 140, 28, 168, 24, 72 and 12 bytes
  on_ranks(2, [](ProcessGroup& world) {
    Replica<Mlp32> r(
        world, {.bucket_cap_mb = 200 * kByte, .first_bucket_mb = 80 * kByte});
    EXPECT_EQ(r.ddp.reducer().buckets(),
              (std::vector<BucketMembers>{{4, 5}, {1, 2, 3}, {0}}));
    for (int step = 0; step < 2; ++step) r.backward();
    // Once rebuilt, the small bucket is the first one
    const BucketMembers first = r.ddp.reducer().buckets()[0];
    std::int64_t bytes = 0, last = 0;
    for (const int i : first) {
      last = r.model.parameters()[static_cast<std::size_t>(i)].bytes();
      bytes += last;
    }
    EXPECT_GE(bytes, 80);
    EXPECT_LT(bytes - last, 80);
  });
}

TEST(DdpOrder, EvaluationDoesNotRebuildTheBuckets) {
  on_ranks(2, [](ProcessGroup& world) {
    Replica<Mlp> r(world, {}, 12, 1);
    r.backward();
    world.clear_records();
    {
      NoGrad no_grad;
      r.ddp(r.mine.x);
    }
    EXPECT_FALSE(r.ddp.reducer().has_rebuilt());
    EXPECT_TRUE(world.records().empty());
    r.ddp(r.mine.x);
    EXPECT_TRUE(r.ddp.reducer().has_rebuilt());
  });
}

// --- SyncBatchNorm ----------------------------------------------------------

/// A branch with batch norm and one without, added in either order.
class NormBranches : public ModuleOf<NormBranches> {
 public:
  NormBranches()
      : a("a", 5, 3, init_of(DType::kF64)),
        norm(3, init_of(DType::kF64)),
        b("b", 5, 3, init_of(DType::kF64)) {}
  Tensor forward(const Tensor& x) override {
    if (a_first) {
      const Tensor y = norm(a(x));
      return add(y, b(x));
    }
    const Tensor y = b(x);
    return add(y, norm(a(x)));
  }
  void members(MemberVisitor& visit) override {
    visit.module("a", a);
    visit.module("norm", norm);
    visit.module("b", b);
  }
  Linear a;
  BatchNorm norm;
  Linear b;
  bool a_first = true;
};

// Backward reaches the statistics before b's gradients on one rank and after
// them on the other: in the gradients' own group, calls would not match.
TEST(DdpSyncBatchNorm, StatisticsTravelBesideTheBucketsInAGroupOfTheirOwn) {
  const auto ranks = on_ranks(2, [](ProcessGroup& world) {
    NormBranches model;
    model.a_first = world.rank() == 0;
    ddp::convert_sync_batchnorm(model, world);
    DistributedDataParallel ddp(
        model, world, {.bucket_cap_mb = kByte, .first_bucket_mb = kByte});
    const Samples mine = mine_of(world, 1);
    mse_loss(ddp(mine.x), mine.y).backward();
    std::vector<std::string> groups;
    for (const CommRecord& record :
         records_of(world, CommOp::kAllReduce, "statistics")) {
      groups.push_back(record.group);
    }
    EXPECT_EQ(groups, std::vector<std::string>(3, "sync_batch_norm"));
    return grads_of(model);
  });
  EXPECT_EQ(ranks[0], ranks[1]);
  EXPECT_LT(largest_difference(ranks[0], one_device_grads<NormBranches>(12, 1)),
            1e-12);
}

}  // namespace
}  // namespace shardbook::ddp_test
