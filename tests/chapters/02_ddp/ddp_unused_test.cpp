// Parameters that some ranks do not use, or use twice; static graphs.

#include <gtest/gtest.h>

#include "tests/chapters/02_ddp/ddp_reducer_support.h"

namespace shardbook::ddp_test {
namespace {

using ddp::DdpOptions;
using ddp::DistributedDataParallel;

// --- Unused parameters -------------------------------------------------------

DdpOptions finding(bool view) {
  DdpOptions options = tiny_buckets();
  options.find_unused_parameters = true;
  options.gradient_as_bucket_view = view;
  return options;
}

DdpOptions static_graph(bool view = false) {
  DdpOptions options = tiny_buckets();
  options.static_graph = true;
  options.gradient_as_bucket_view = view;
  return options;
}

TEST(DdpUnused, UsedOnSomeRanksEveryoneGetsTheSumOverD) {
  for (const bool view : {false, true}) {
    const auto grads = on_ranks(3, [&](ProcessGroup& world) {
      Replica<Branches> r(world, finding(view), 6);
      r.model.use = world.rank() == 1 ? "ab" : "a";
      for (int step = 0; step < 2; ++step) {
        r.model.clear_grad();
        world.clear_records();
        r.backward();
        // Four buckets and one flag per parameter, at the end.
        const auto log = records_of(world, CommOp::kAllReduce);
        EXPECT_EQ(log.size(), 5u);
        EXPECT_EQ(log.back().numel, 4);
        EXPECT_EQ(log.back().dtype, DType::kI32);
      }
      return values_of({r.model.b.weight.grad(), r.model.b.bias.grad()});
    });
    Branches model;
    mse(model, every(make_samples(6, DType::kF64), 1, 3)).backward();
    Values expected = values_of({model.b.weight.grad(), model.b.bias.grad()});
    for (double& value : expected) value /= 3;
    for (const Values& rank : grads) {
      EXPECT_LT(largest_difference(rank, expected), 1e-14);
    }
  }
}

TEST(DdpUnused, UsedNowhereTheGradientStaysUndefinedAndMomentumAtRest) {
  for (const bool view : {false, true}) {
    on_ranks(2, [&](ProcessGroup& world) {
      Replica<Branches> r(world, finding(view));
      r.model.use = "a";
      const Values before = values_of(r.model.b.parameters());
      const auto optimizer = make_optimizer(
          "sgd", r.model.parameters(), {.weight_decay = 0.1, .momentum = 0.9});
      for (int step = 0; step < 2; ++step) {
        r.backward();
        EXPECT_FALSE(r.model.b.weight.grad().defined());
        EXPECT_TRUE(r.model.a.weight.grad().defined());
        optimizer->step();
        r.model.clear_grad();
      }
      EXPECT_EQ(values_of(r.model.b.parameters()), before);
    });
  }
}

TEST(DdpUnused, UsedNowhereAnOldGradientIsUntouched) {
  for (const bool view : {false, true}) {
    on_ranks(3, [&](ProcessGroup& world) {
      Replica<Branches> r(world, finding(view), 6);
      r.backward();
      const Values old = values_of({r.model.b.weight.grad()});
      r.model.use = "a";
      for (int step = 0; step < 2; ++step) {
        r.backward();
        EXPECT_EQ(values_of({r.model.b.weight.grad()}), old);
      }
    });
  }
}

TEST(DdpUnused, AParameterUsedUnderNoSyncCountsAsUsed) {
  for (const bool view : {false, true}) {
    const auto grads = on_ranks(2, [&](ProcessGroup& world) {
      Replica<Branches> r(world, finding(view));
      {
        auto no_sync = r.ddp.no_sync();
        r.backward();
      }
      r.model.use = "a";
      r.backward();
      return values_of({r.model.b.weight.grad()});
    });
    Branches model;
    mse(model, make_samples(4, DType::kF64)).backward();
    EXPECT_EQ(grads[0], grads[1]);
    EXPECT_LT(largest_difference(grads[0], values_of({model.b.weight.grad()})),
              1e-12);
  }
}

TEST(DdpTrap, AMissingGradientIsNamedByTheNextForward) {
  const std::string error = error_on_ranks(2, [](ProcessGroup& world) {
    Replica<Branches> r(world);
    r.model.use = world.rank() == 1 ? "a" : "ab";
    r.backward();
    r.ddp(r.mine.x);
  });
  expect_text(error, {"expected to have finished reduction", "rank 1",
                      "'b.weight', 'b.bias'"});
  EXPECT_FALSE(has_text(error, "'a.weight'")) << error;
}

TEST(DdpTrap, AParameterFrozenAfterConstructionIsMissed) {
  const std::string error = error_on_ranks(2, [](ProcessGroup& world) {
    Replica<Branches> r(world);
    r.model.b.weight.set_requires_grad(false);
    r.backward();
    r.ddp(r.mine.x);
  });
  expect_text(error, {"no gradient came for 'b.weight'"});
}

TEST(DdpTrap, AParameterTrainedAfterConstructionIsRefused) {
  const std::string error = error_on_ranks(2, [](ProcessGroup& world) {
    Branches model;
    model.b.weight.set_requires_grad(false);
    DistributedDataParallel ddp(model, world);
    model.b.weight.set_requires_grad();
    ddp.module()(make_samples(4, DType::kF64).x);  // on one rank alone
    ddp(make_samples(4, DType::kF64).x);
  });
  expect_text(error, {"'b.weight' was frozen at construction"});
}

// --- Recomputation and static graphs -----------------------------------------

/// One layer used twice, each time in a recomputed block.
class Twice : public ModuleOf<Twice> {
 public:
  Twice()
      : layer("layer", 5, 5, init_of(DType::kF64)),
        head("head", 5, 3, init_of(DType::kF64)) {}
  Tensor forward(const Tensor& x) override {
    auto block = [this](const Tensors& in) {
      return Tensors{tanh(layer(in[0]))};
    };
    const Tensors once = autograd::recompute(block, {x});
    return head(autograd::recompute(block, once)[0]);
  }
  void members(MemberVisitor& visit) override {
    visit.module("layer", layer);
    visit.module("head", head);
  }
  Linear layer, head;
};

std::vector<Values> train_twice(const DdpOptions& options) {
  return on_ranks(2, [&](ProcessGroup& world) {
    Twice model;
    DistributedDataParallel ddp(model, world, options);
    const auto optimizer = make_optimizer("sgd", model.parameters(), {0.1});
    for (std::uint64_t step = 0; step < 3; ++step) {
      const Samples mine =
          every(make_samples(4, DType::kF64, step), world.rank(), 2);
      mse_loss(ddp(mine.x), mine.y).backward();
      optimizer->step();
      model.clear_grad();
    }
    return values_of(model.parameters());
  });
}

TEST(DdpStaticGraph, ParametersMayBeUsedByTwoRecomputedBlocks) {
  Twice model;
  const auto optimizer = make_optimizer("sgd", model.parameters(), {0.1});
  for (std::uint64_t step = 0; step < 3; ++step) {
    mse(model, make_samples(4, DType::kF64, step)).backward();
    optimizer->step();
    model.clear_grad();
  }
  for (const bool view : {false, true}) {
    const auto ranks = train_twice(static_graph(view));
    EXPECT_EQ(ranks[0], ranks[1]);
    EXPECT_LT(largest_difference(ranks[0], values_of(model.parameters())),
              1e-12);
  }
}

TEST(DdpTrap, WithoutStaticGraphTheyAreMarkedReadyTwice) {
  for (const bool find : {false, true}) {
    expect_error([&] { train_twice(find ? finding(false) : tiny_buckets()); },
                 {"marked ready twice", "'layer."});
  }
}

TEST(DdpStaticGraph, UnusedParametersAreFoundOnceAndForAll) {
  on_ranks(2, [](ProcessGroup& world) {
    Replica<Branches> r(world, static_graph());
    r.model.use = "a";
    for (int step = 0; step < 3; ++step) {
      r.backward();
      EXPECT_FALSE(r.model.b.weight.grad().defined());
      r.model.clear_grad();
    }
    EXPECT_EQ(records_of(world, CommOp::kAllReduce, "used").size(), 1u);
  });
}

TEST(DdpStaticGraph, AGraphThatChangesIsAnError) {
  const std::string error = error_on_ranks(2, [](ProcessGroup& world) {
    Replica<Branches> r(world, {.static_graph = true});
    r.model.use = "a";
    r.backward();
    r.model.use = "ab";
    r.backward();
  });
  expect_text(error, {"static graph changed"});
}

}  // namespace
}  // namespace shardbook::ddp_test
