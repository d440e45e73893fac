// Models that DDP accepts or refuses: frozen, tied, of several dtypes or
// devices; and their buffers.

#include <gtest/gtest.h>

#include "tests/chapters/02_ddp/ddp_reducer_support.h"
#include "tests/support/errors.h"

namespace shardbook::ddp_test {
namespace {

using ddp::DistributedDataParallel;

// --- Models ------------------------------------------------------------------

TEST(DdpModel, DifferentModelsAreRefusedOnEveryRankByName) {
  const std::string shape = error_on_ranks(3, [](ProcessGroup& world) {
    Linear model("0", 4, world.rank() == 2 ? 9 : 8, init_of(DType::kF32));
    DistributedDataParallel ddp(model, world);
  });
  expect_text(shape, {"parameter 0 is 'weight' f32[4, 8] on rank 0 and "
                      "'weight' f32[4, 9] on rank 2"});
  const std::string count = error_on_ranks(2, [](ProcessGroup& world) {
    Linear model("0", 4, 8, init_of(DType::kF32), world.rank() == 0);
    DistributedDataParallel ddp(model, world);
  });
  expect_text(count, {"rank 0 has 2 parameters and rank 1 has 1"});
}

TEST(DdpModel, FrozenParametersAreCopiedButNotReduced) {
  on_ranks(2, [](ProcessGroup& world) {
    Branches model;
    model.b.weight.fill(world.rank());
    model.b.set_requires_grad(false);
    DistributedDataParallel ddp(model, world, tiny_buckets());
    EXPECT_EQ(ddp.reducer().buckets().size(), 2u);
    EXPECT_EQ(max_abs_difference(model.b.weight, model.b.weight.zeros_like()),
              0);
    const Samples mine = every(make_samples(4, DType::kF64), world.rank(), 2);
    for (int step = 0; step < 2; ++step) {
      mse_loss(ddp(mine.x), mine.y).backward();
    }
    EXPECT_FALSE(model.b.weight.grad().defined());
  });
}

TEST(DdpModel, AModelWithoutTrainableParametersIsRefused) {
  expect_text(error_on_ranks(1,
                             [](ProcessGroup& world) {
                               Sequential model;
                               model.add(Relu());
                               DistributedDataParallel ddp(model, world);
                             }),
              {"no parameter of Sequential requires a gradient"});
}

/// The first half in f32, the second in f64.
struct MixedDtypes : Sequential {
  MixedDtypes() {
    add(Linear("a", 5, 4, init_of(DType::kF32)));
    add(CastTo(DType::kF64));
    add(Linear("b", 4, 3, init_of(DType::kF64)));
  }
};

TEST(DdpModel, DtypesTravelInBucketsOfTheirOwn) {
  const auto grads = on_ranks(2, [](ProcessGroup& world) {
    MixedDtypes model;
    DistributedDataParallel ddp(model, world);
    const Samples mine = every(make_samples(4, DType::kF32), world.rank(), 2);
    for (int step = 0; step < 2; ++step) {
      model.clear_grad();
      world.clear_records();
      mse_loss(ddp(mine.x), to_dtype(mine.y, DType::kF64)).backward();
      const auto log = records_of(world, CommOp::kAllReduce);
      EXPECT_EQ(numels(log), (Numels{15, 24}));
      EXPECT_EQ(log[0].dtype, DType::kF64);
      EXPECT_EQ(log[1].dtype, DType::kF32);
    }
    return grads_of(model);
  });
  MixedDtypes model;
  const Samples all = make_samples(4, DType::kF32);
  mse_loss(model(all.x), to_dtype(all.y, DType::kF64)).backward();
  EXPECT_EQ(grads[0], grads[1]);
  EXPECT_LT(largest_difference(grads[0], grads_of(model)), 1e-5);
}

/// Two layers on two devices of one rank: backward runs a thread for each.
class TwoDevices : public ModuleOf<TwoDevices> {
 public:
  explicit TwoDevices(const Device& second)
      : second(second), a("a", 5, 4, init_of(DType::kF64)), b("b", 4, 3, [&] {
          InitOptions init = init_of(DType::kF64);
          init.device = second;
          return init;
        }()) {}
  Tensor forward(const Tensor& x) override {
    return to_device(b(to_device(a(x), second)), x.device());
  }
  void members(MemberVisitor& visit) override {
    visit.module("a", a);
    visit.module("b", b);
  }
  Device second;
  Linear a, b;
};

TEST(DdpModel, MayLieOnSeveralDevicesOfEachRank) {
  const auto grads = on_ranks(2, [](ProcessGroup& world) {
    TwoDevices model(Device::cpu(10 + world.rank()));
    DistributedDataParallel ddp(model, world, tiny_buckets());
    const Samples mine = every(make_samples(4, DType::kF64), world.rank(), 2);
    for (int step = 0; step < 3; ++step) {
      model.clear_grad();
      mse_loss(ddp(mine.x), mine.y).backward();
    }
    return grads_of(model);
  });
  TwoDevices model(Device::cpu(9));
  mse(model, make_samples(4, DType::kF64)).backward();
  EXPECT_EQ(grads[0], grads[1]);
  EXPECT_LT(largest_difference(grads[0], grads_of(model)), 1e-12);
}

TEST(DdpModel, GradientsAreViewsOfTheBucketsWhenAsked) {
  on_ranks(2, [](ProcessGroup& world) {
    Replica<Branches> r(world, {.gradient_as_bucket_view = true});
    for (int step = 0; step < 3; ++step) {
      r.backward();
      EXPECT_TRUE(
          r.model.a.weight.grad().shares_storage(r.model.b.bias.grad()));
      if (step > 0) r.model.clear_grad();
    }
  });
}

TEST(DdpModel, AfterItsEndBackwardIsLocalAgain) {
  on_ranks(2, [](ProcessGroup& world) {
    Branches model;
    const Samples mine = every(make_samples(4, DType::kF64), world.rank(), 2);
    {
      DistributedDataParallel ddp(model, world,
                                  {.gradient_as_bucket_view = true});
      mse_loss(ddp(mine.x), mine.y).backward();
    }
    world.clear_records();
    model.clear_grad();
    mse(model, mine).backward();
    EXPECT_TRUE(world.records().empty());
  });
}

TEST(DdpModel, DivisionComesBeforeTheSum) {
  // 40000 + 40000 does not fit into f16; their mean does.
  const auto means = on_ranks(2, [](ProcessGroup& world) {
    Linear model("0", 1, 1, init_of(DType::kF16), /*with_bias=*/false);
    DistributedDataParallel ddp(model, world);
    sum(ddp(Tensor::full({1, 1}, 40000, {DType::kF16, Device()}))).backward();
    return model.weight.grad().item();
  });
  EXPECT_EQ(means, (std::vector<double>{40000, 40000}));
}

// --- Buffers -----------------------------------------------------------------

TEST(DdpBuffers, RankZeroSharesItsRunningStatistics) {
  const auto buffers = on_ranks(2, [](ProcessGroup& world) {
    Replica<NormNet> r(world, {}, 8);
    for (int step = 0; step < 3; ++step) r.backward();
    const Values own = values_of(r.model.buffers());
    r.model.train(false);
    r.ddp(r.mine.x);
    EXPECT_EQ(records_of(world, CommOp::kBroadcast, "buffers").size(), 1u + 4u);
    return std::pair(own, values_of(r.model.buffers()));
  });
  // Each rank's own, until the next forward
  EXPECT_NE(buffers[0].first, buffers[1].first);
  EXPECT_EQ(buffers[0].second, buffers[0].first);
  EXPECT_EQ(buffers[1].second, buffers[0].first);
}

TEST(DdpBuffers, NothingIsSharedAfterAForwardUnderNoSync) {
  on_ranks(2, [](ProcessGroup& world) {
    Replica<NormNet> r(world, {}, 8);
    world.clear_records();
    {
      auto no_sync = r.ddp.no_sync();
      for (int i = 0; i < 3; ++i) r.backward();
    }
    r.backward();
    // Before the first forward after construction, but not before later ones.
    EXPECT_EQ(records_of(world, CommOp::kBroadcast, "buffers").size(), 1u);
  });
}

TEST(DdpBuffers, EachRankKeepsItsOwnOnRequest) {
  on_ranks(2, [](ProcessGroup& world) {
    Replica<NormNet> r(world, {.broadcast_buffers = false}, 8);
    world.clear_records();
    for (int i = 0; i < 2; ++i) r.backward();
    EXPECT_TRUE(records_of(world, CommOp::kBroadcast, "buffers").empty());
  });
}

}  // namespace
}  // namespace shardbook::ddp_test
