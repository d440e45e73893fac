// The reducer: what it sends, in which order, and what it refuses.

#include <gtest/gtest.h>

#include <cmath>

#include "chapters/common/run/trace.h"
#include "tests/chapters/02_ddp/ddp_support.h"

namespace shardbook::ddp_test {
namespace {

using ddp::Bucket;
using ddp::DdpOptions;
using ddp::DistributedDataParallel;
using Numels = std::vector<std::int64_t>;

DdpOptions tiny_buckets(double bytes = 1) {
  DdpOptions options;
  options.bucket_cap_mb = options.first_bucket_mb = bytes * kByte;
  return options;
}

/// Two branches; each call uses those in `use`, in that order.
class Branches : public ModuleOf<Branches> {
 public:
  explicit Branches(DType dtype = DType::kF64)
      : a("a", 5, 3, init_of(dtype)), b("b", 5, 3, init_of(dtype)) {}
  Tensor forward(const Tensor& x) override {
    Tensor y;
    for (const char name : use) {
      const Tensor part = name == 'a' ? a(x) : b(x);
      y = y.defined() ? add(y, part) : part;
    }
    return y;
  }
  void members(MemberVisitor& visit) override {
    visit.module("a", a);
    visit.module("b", b);
  }
  Linear a, b;
  std::string use = "ab";
};

// --- The ledger ----------------------------------------------------------------------

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
    Sequential model = make_mlp(DType::kF32);
    DistributedDataParallel ddp(model, world, tiny_buckets(100));
    std::vector<Numels> log;
    const Samples mine = every(make_samples(6, DType::kF32), world.rank(), 3);
    for (int step = 0; step < 3; ++step) {
      world.clear_records();
      mse_loss(ddp(mine.x), mine.y).backward();
      log.push_back(numels(records_of(world, CommOp::kAllReduce)));
      Numels sizes;
      for (const Bucket& bucket : ddp.reducer().buckets()) {
        std::int64_t size = 0;
        for (const int i : bucket) {
          size += model.parameters()[static_cast<std::size_t>(i)].numel();
        }
        sizes.push_back(size);
      }
      EXPECT_EQ(log.back(), sizes);
      model.clear_grad();
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
    Sequential model = make_mlp(DType::kF32);
    DistributedDataParallel ddp(model, world);
    EXPECT_EQ(numels(world.records()), (Numels{111}));
    EXPECT_EQ(world.records()[0].op, CommOp::kBroadcast);
    return 0;
  });
}

TEST(DdpLedger, GroupsOfOneSendNothing) {
  on_ranks(1, [](ProcessGroup& world) {
    Sequential model = make_mlp(DType::kF32);
    DdpOptions options = tiny_buckets();
    options.find_unused_parameters = true;
    DistributedDataParallel ddp(model, world, options);
    const Samples mine = make_samples(4, DType::kF32);
    for (int step = 0; step < 2; ++step) {
      mse_loss(ddp(mine.x), mine.y).backward();
    }
    EXPECT_TRUE(world.records().empty());
    return 0;
  });
}

// --- Overlap ---------------------------------------------------------------------------

/// Backward operations that begin after the first bucket was sent; results
/// that are copied out of the buckets do not count.
std::int64_t backward_ops_after_first_bucket(const DdpOptions& options) {
  return on_ranks(2, [&](ProcessGroup& world) {
    Sequential model = make_mlp(DType::kF32);
    DistributedDataParallel ddp(model, world, options);
    const Samples mine = every(make_samples(8, DType::kF32), world.rank(), 2);
    mse_loss(ddp(mine.x), mine.y).backward();  // and the buckets are rebuilt
    model.clear_grad();
    Trace trace(world.rank());
    RankContext::current().add_observer(&trace);
    world.set_observer(&trace);
    mse_loss(ddp(mine.x), mine.y).backward();
    RankContext::current().remove_observer(&trace);
    world.set_observer(nullptr);
    std::int64_t later = -1;
    for (const TraceEvent& event : trace.events()) {
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

// --- The order of buckets -----------------------------------------------------------

TEST(DdpOrder, RebuiltBucketsFollowTheArrivalOnRankZero) {
  // Backward meets the branch of the later addition first.
  const auto buckets = on_ranks(2, [](ProcessGroup& world) {
    Branches model;
    model.use = world.rank() == 0 ? "ba" : "ab";
    DistributedDataParallel ddp(model, world, tiny_buckets());
    const Samples mine = every(make_samples(4, DType::kF64), world.rank(), 2);
    const auto before = ddp.reducer().buckets();
    EXPECT_EQ(before, (std::vector<Bucket>{{3}, {2}, {1}, {0}}));
    mse_loss(ddp(mine.x), mine.y).backward();
    EXPECT_FALSE(ddp.reducer().has_rebuilt());
    mse_loss(ddp(mine.x), mine.y).backward();
    EXPECT_TRUE(ddp.reducer().has_rebuilt());
    EXPECT_EQ(records_of(world, CommOp::kBroadcast, "bucket order").size(), 1u);
    return ddp.reducer().buckets();
  });
  EXPECT_EQ(buckets[0], buckets[1]);
  // Branch a (parameters 0 and 1) came first on rank 0.
  EXPECT_LT(buckets[0][0][0], 2);
  EXPECT_LT(buckets[0][1][0], 2);
}

TEST(DdpOrder, RanksWhoseGradientsComeInDifferentOrdersAgree) {
  const auto grads = on_ranks(2, [](ProcessGroup& world) {
    Branches model;
    model.use = world.rank() == 0 ? "ba" : "ab";
    DistributedDataParallel ddp(model, world, tiny_buckets());
    const Samples mine = every(make_samples(4, DType::kF64), world.rank(), 2);
    for (int step = 0; step < 3; ++step) {
      model.clear_grad();
      mse_loss(ddp(mine.x), mine.y).backward();
    }
    return grads_of(model);
  });
  Branches model;
  mse(model, make_samples(4, DType::kF64)).backward();
  EXPECT_EQ(grads[0], grads[1]);
  EXPECT_LT(largest_difference(grads[0], grads_of(model)), 1e-12);
}

// The same without the rule: whoever is ready sends.
TEST(DdpTrap, LaunchingInTheOrderOfReadinessMixesUpTheRanks) {
  const std::string error = error_on_ranks(2, [](ProcessGroup& world) {
    Branches model;
    model.use = world.rank() == 0 ? "ba" : "ab";
    model.b = Linear("b", 5, 3, init_of(DType::kF64), /*with_bias=*/false);
    for (const Tensor& parameter : model.parameters()) {
      parameter.add_accumulate_hook([&world](Tensor& ready) {
        world.all_reduce(ready.grad(), ReduceOp::kSum, "ready").wait();
      });
    }
    const Samples mine = every(make_samples(4, DType::kF64), world.rank(), 2);
    mse(model, mine).backward();
  });
  EXPECT_TRUE(has_text(error, "rank 0") && has_text(error, "rank 1") &&
              has_text(error, "all_reduce"))
      << error;
}

// --- no_sync ------------------------------------------------------------------------

struct Accumulated {
  Values grads;
  Numels log;
};

/// Three pieces of this rank's samples under `step`.
template <typename Step>
Accumulated accumulate(const DdpOptions& options, Step step) {
  return on_ranks(2, [&](ProcessGroup& world) {
    Sequential model = make_mlp(DType::kF64);
    DistributedDataParallel ddp(model, world, options);
    const Samples mine = every(make_samples(12, DType::kF64), world.rank(), 2);
    world.clear_records();
    for (int i = 0; i < 3; ++i) step(ddp, every(mine, i, 3), i);
    return Accumulated{grads_of(model),
                       numels(records_of(world, CommOp::kAllReduce))};
  })[0];
}

Values full_gradients() {
  Sequential model = make_mlp(DType::kF64);
  mse(model, make_samples(12, DType::kF64)).backward();
  return grads_of(model);
}

TEST(DdpNoSync, AccumulationSendsWhatOneStepSends) {
  for (const bool view : {false, true}) {
    DdpOptions options = tiny_buckets(100);
    options.gradient_as_bucket_view = view;
    const Accumulated result = accumulate(
        options, [](DistributedDataParallel& ddp, const Samples& s, int i) {
          if (i < 2) {
            auto no_sync = ddp.no_sync();
            scale(mse_loss(ddp(s.x), s.y), 1.0 / 3).backward();
          } else {
            scale(mse_loss(ddp(s.x), s.y), 1.0 / 3).backward();
          }
        });
    EXPECT_EQ(result.log, (Numels{3, 24, 49, 35}));
    EXPECT_LT(largest_difference(result.grads, full_gradients()), 1e-12);
  }
}

TEST(DdpNoSync, ScopesNest) {
  on_ranks(2, [](ProcessGroup& world) {
    Sequential model = make_mlp(DType::kF64);
    DistributedDataParallel ddp(model, world);
    world.clear_records();
    const Samples mine = every(make_samples(4, DType::kF64), world.rank(), 2);
    auto outer = ddp.no_sync();
    { auto inner = ddp.no_sync(); }
    mse_loss(ddp(mine.x), mine.y).backward();
    EXPECT_TRUE(world.records().empty());
    return 0;
  });
}

TEST(DdpTrap, NoSyncAroundBackwardAloneStillReducesEveryTime) {
  const Accumulated result =
      accumulate({}, [](DistributedDataParallel& ddp, const Samples& s, int i) {
        const Tensor loss = scale(mse_loss(ddp(s.x), s.y), 1.0 / 3);
        auto no_sync = ddp.no_sync();
        loss.backward();
      });
  // Three times the traffic. The result is right all the same: a sum that is
  // equal on all ranks is its own mean.
  EXPECT_EQ(result.log, (Numels(3, 111)));
  EXPECT_LT(largest_difference(result.grads, full_gradients()), 1e-12);
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
  EXPECT_GT(largest_difference(result.grads, full_gradients()), 1e-3);
}

TEST(DdpTrap, ALossNotDividedByTheMicroBatchesGivesTheirSum) {
  const Accumulated result =
      accumulate({}, [](DistributedDataParallel& ddp, const Samples& s, int i) {
        if (i < 2) {
          auto no_sync = ddp.no_sync();
          mse_loss(ddp(s.x), s.y).backward();
        } else {
          mse_loss(ddp(s.x), s.y).backward();
        }
      });
  Values right = full_gradients();
  EXPECT_GT(largest_difference(result.grads, right), 1e-3);
  for (double& value : right) value *= 3;
  EXPECT_LT(largest_difference(result.grads, right), 1e-12);
}

// --- Unused parameters -----------------------------------------------------------------

DdpOptions finding(bool view = false) {
  DdpOptions options = tiny_buckets();
  options.find_unused_parameters = true;
  options.gradient_as_bucket_view = view;
  return options;
}

TEST(DdpUnused, UsedOnSomeRanksEveryoneGetsTheSumOverD) {
  for (const bool view : {false, true}) {
    const auto grads = on_ranks(3, [&](ProcessGroup& world) {
      Branches model;
      model.use = world.rank() == 1 ? "ab" : "a";
      DistributedDataParallel ddp(model, world, finding(view));
      const Samples mine = every(make_samples(6, DType::kF64), world.rank(), 3);
      for (int step = 0; step < 2; ++step) {
        model.clear_grad();
        world.clear_records();
        mse_loss(ddp(mine.x), mine.y).backward();
        // Four buckets and one flag per parameter, at the end.
        const auto log = records_of(world, CommOp::kAllReduce);
        EXPECT_EQ(log.size(), 5u);
        EXPECT_EQ(log.back().numel, 4);
        EXPECT_EQ(log.back().dtype, DType::kI32);
      }
      return values_of({model.b.weight.grad(), model.b.bias.grad()});
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
      Branches model;
      model.use = "a";
      const Values before = values_of(model.b.parameters());
      DistributedDataParallel ddp(model, world, finding(view));
      OptimizerOptions how;
      how.momentum = 0.9;
      how.weight_decay = 0.1;
      const auto optimizer = make_optimizer("sgd", model.parameters(), how);
      const Samples mine = every(make_samples(4, DType::kF64), world.rank(), 2);
      for (int step = 0; step < 2; ++step) {
        mse_loss(ddp(mine.x), mine.y).backward();
        EXPECT_FALSE(model.b.weight.grad().defined());
        EXPECT_TRUE(model.a.weight.grad().defined());
        optimizer->step();
        model.clear_grad();
      }
      EXPECT_EQ(values_of(model.b.parameters()), before);
      return 0;
    });
  }
}

TEST(DdpUnused, UsedNowhereAnOldGradientIsUntouched) {
  for (const bool view : {false, true}) {
    on_ranks(3, [&](ProcessGroup& world) {
      Branches model;
      DistributedDataParallel ddp(model, world, finding(view));
      const Samples mine = every(make_samples(6, DType::kF64), world.rank(), 3);
      mse_loss(ddp(mine.x), mine.y).backward();
      const Values old = values_of({model.b.weight.grad()});
      model.use = "a";
      for (int step = 0; step < 2; ++step) {
        mse_loss(ddp(mine.x), mine.y).backward();
        EXPECT_EQ(values_of({model.b.weight.grad()}), old);
      }
      return 0;
    });
  }
}

TEST(DdpUnused, AParameterUsedUnderNoSyncCountsAsUsed) {
  for (const bool view : {false, true}) {
    const auto grads = on_ranks(2, [&](ProcessGroup& world) {
      Branches model;
      DistributedDataParallel ddp(model, world, finding(view));
      const Samples mine = every(make_samples(4, DType::kF64), world.rank(), 2);
      {
        auto no_sync = ddp.no_sync();
        mse_loss(ddp(mine.x), mine.y).backward();
      }
      model.use = "a";
      mse_loss(ddp(mine.x), mine.y).backward();
      return values_of({model.b.weight.grad()});
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
    Branches model;
    model.use = world.rank() == 1 ? "a" : "ab";
    DistributedDataParallel ddp(model, world);
    const Samples mine = every(make_samples(4, DType::kF64), world.rank(), 2);
    mse_loss(ddp(mine.x), mine.y).backward();
    ddp(mine.x);
  });
  EXPECT_TRUE(has_text(error, "expected to have finished reduction")) << error;
  EXPECT_TRUE(has_text(error, "rank 1")) << error;
  EXPECT_TRUE(has_text(error, "'b.weight', 'b.bias'")) << error;
  EXPECT_FALSE(has_text(error, "'a.weight'")) << error;
}

TEST(DdpTrap, AParameterFrozenAfterConstructionIsMissed) {
  const std::string error = error_on_ranks(2, [](ProcessGroup& world) {
    Branches model;
    DistributedDataParallel ddp(model, world);
    model.b.weight.set_requires_grad(false);
    const Samples mine = every(make_samples(4, DType::kF64), world.rank(), 2);
    mse_loss(ddp(mine.x), mine.y).backward();
    ddp(mine.x);
  });
  EXPECT_TRUE(has_text(error, "no gradient came for 'b.weight'")) << error;
}

// --- Recomputation and static graphs ------------------------------------------------------

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
    DdpOptions options = tiny_buckets();
    options.static_graph = true;
    options.gradient_as_bucket_view = view;
    const auto ranks = train_twice(options);
    EXPECT_EQ(ranks[0], ranks[1]);
    EXPECT_LT(largest_difference(ranks[0], values_of(model.parameters())),
              1e-12);
  }
}

TEST(DdpTrap, WithoutStaticGraphTheyAreMarkedReadyTwice) {
  for (const bool find : {false, true}) {
    DdpOptions options = tiny_buckets();
    options.find_unused_parameters = find;
    std::string error;
    try {
      train_twice(options);
    } catch (const Error& caught) {
      error = caught.what();
    }
    EXPECT_TRUE(has_text(error, "marked ready twice")) << error;
    EXPECT_TRUE(has_text(error, "'layer.")) << error;
  }
}

TEST(DdpStaticGraph, UnusedParametersAreFoundOnceAndForAll) {
  on_ranks(2, [](ProcessGroup& world) {
    Branches model;
    model.use = "a";
    DdpOptions options = tiny_buckets();
    options.static_graph = true;
    DistributedDataParallel ddp(model, world, options);
    const Samples mine = every(make_samples(4, DType::kF64), world.rank(), 2);
    for (int step = 0; step < 3; ++step) {
      mse_loss(ddp(mine.x), mine.y).backward();
      EXPECT_FALSE(model.b.weight.grad().defined());
      model.clear_grad();
    }
    EXPECT_EQ(records_of(world, CommOp::kAllReduce, "used").size(), 1u);
    return 0;
  });
}

TEST(DdpStaticGraph, AGraphThatChangesIsAnError) {
  const std::string error = error_on_ranks(2, [](ProcessGroup& world) {
    Branches model;
    model.use = "a";
    DdpOptions options;
    options.static_graph = true;
    DistributedDataParallel ddp(model, world, options);
    const Samples mine = every(make_samples(4, DType::kF64), world.rank(), 2);
    mse_loss(ddp(mine.x), mine.y).backward();
    model.use = "ab";
    mse_loss(ddp(mine.x), mine.y).backward();
  });
  EXPECT_TRUE(has_text(error, "static graph changed")) << error;
}

// --- Models -----------------------------------------------------------------------------

TEST(DdpModel, DifferentModelsAreRefusedOnEveryRankByName) {
  const std::string shape = error_on_ranks(3, [](ProcessGroup& world) {
    Linear model("0", 4, world.rank() == 2 ? 9 : 8, init_of(DType::kF32));
    DistributedDataParallel ddp(model, world);
  });
  EXPECT_TRUE(has_text(shape,
                       "parameter 0 is 'weight' f32[4, 8] on rank 0 and "
                       "'weight' f32[4, 9] on rank 2"))
      << shape;
  const std::string count = error_on_ranks(2, [](ProcessGroup& world) {
    Linear model("0", 4, 8, init_of(DType::kF32), world.rank() == 0);
    DistributedDataParallel ddp(model, world);
  });
  EXPECT_TRUE(has_text(count, "rank 0 has 2 parameters and rank 1 has 1"))
      << count;
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
    return 0;
  });
}

TEST(DdpModel, AModelWithoutTrainableParametersIsRefused) {
  EXPECT_TRUE(has_text(error_on_ranks(1,
                                      [](ProcessGroup& world) {
                                        Sequential model;
                                        model.add(Relu());
                                        DistributedDataParallel ddp(model,
                                                                    world);
                                      }),
                       "no parameter of Sequential requires a gradient"));
}

TEST(DdpModel, TiedWeightsAreReducedOnce) {
  const auto grads = on_ranks(2, [](ProcessGroup& world) {
    Branches model;
    model.b.weight = model.a.weight;
    DistributedDataParallel ddp(model, world, tiny_buckets());
    EXPECT_EQ(ddp.reducer().buckets().size(), 3u);
    const Samples mine = every(make_samples(4, DType::kF64), world.rank(), 2);
    mse_loss(ddp(mine.x), mine.y).backward();
    return values_of({model.a.weight.grad()});
  });
  Branches model;
  model.b.weight = model.a.weight;
  mse(model, make_samples(4, DType::kF64)).backward();
  EXPECT_LT(largest_difference(grads[0], values_of({model.a.weight.grad()})),
            1e-12);
}

/// The first half in f32, the second in f64.
class MixedDtypes : public ModuleOf<MixedDtypes> {
 public:
  MixedDtypes()
      : a("a", 5, 4, init_of(DType::kF32)),
        b("b", 4, 3, init_of(DType::kF64)) {}
  Tensor forward(const Tensor& x) override {
    return b(to_dtype(a(x), DType::kF64));
  }
  void members(MemberVisitor& visit) override {
    visit.module("a", a);
    visit.module("b", b);
  }
  Linear a, b;
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
    Branches model;
    DdpOptions options;
    options.gradient_as_bucket_view = true;
    DistributedDataParallel ddp(model, world, options);
    const Samples mine = every(make_samples(4, DType::kF64), world.rank(), 2);
    for (int step = 0; step < 3; ++step) {
      mse_loss(ddp(mine.x), mine.y).backward();
      EXPECT_TRUE(model.a.weight.grad().shares_storage(model.b.bias.grad()));
      if (step > 0) model.clear_grad();
    }
    return 0;
  });
}

TEST(DdpModel, AfterItsEndBackwardIsLocalAgain) {
  on_ranks(2, [](ProcessGroup& world) {
    Branches model;
    const Samples mine = every(make_samples(4, DType::kF64), world.rank(), 2);
    {
      DdpOptions options;
      options.gradient_as_bucket_view = true;
      DistributedDataParallel ddp(model, world, options);
      mse_loss(ddp(mine.x), mine.y).backward();
    }
    world.clear_records();
    model.clear_grad();
    mse(model, mine).backward();
    EXPECT_TRUE(world.records().empty());
    return 0;
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

// --- Buffers ----------------------------------------------------------------------------

/// Running statistics on each rank as its fourth forward sees them.
std::vector<Values> buffers_after_training(bool broadcast) {
  return on_ranks(2, [&](ProcessGroup& world) {
    Sequential model;
    model.add(Linear("0", 5, 3, init_of(DType::kF64)));
    model.add(BatchNorm(3, init_of(DType::kF64)));
    DdpOptions options;
    options.broadcast_buffers = broadcast;
    DistributedDataParallel ddp(model, world, options);
    const Samples mine = every(make_samples(8, DType::kF64), world.rank(), 2);
    for (int step = 0; step < 3; ++step) {
      mse_loss(ddp(mine.x), mine.y).backward();
    }
    model.train(false);
    ddp(mine.x);
    EXPECT_EQ(records_of(world, CommOp::kBroadcast, "buffers").size(),
              broadcast ? 1u + 4u : 1u);
    return values_of(model.buffers());
  });
}

TEST(DdpBuffers, RankZeroSharesItsRunningStatistics) {
  const auto shared = buffers_after_training(true);
  EXPECT_EQ(shared[0], shared[1]);
  const auto own = buffers_after_training(false);
  EXPECT_NE(own[0], own[1]);
  EXPECT_EQ(own[0], shared[0]);
}

TEST(DdpBuffers, NothingIsSharedAfterAForwardUnderNoSync) {
  on_ranks(2, [](ProcessGroup& world) {
    Sequential model;
    model.add(Linear("0", 5, 3, init_of(DType::kF64)));
    model.add(BatchNorm(3, init_of(DType::kF64)));
    DistributedDataParallel ddp(model, world);
    const Samples mine = every(make_samples(8, DType::kF64), world.rank(), 2);
    world.clear_records();
    {
      auto no_sync = ddp.no_sync();
      for (int i = 0; i < 3; ++i) mse_loss(ddp(mine.x), mine.y).backward();
    }
    mse_loss(ddp(mine.x), mine.y).backward();
    // Before the first forward, which follows construction; not before others.
    EXPECT_EQ(records_of(world, CommOp::kBroadcast, "buffers").size(), 1u);
    return 0;
  });
}

// --- Hooks ------------------------------------------------------------------------------

std::vector<Values> grads_with_hook(const ddp::CommHook& hook, DType on_wire) {
  return on_ranks(3, [&](ProcessGroup& world) {
    Sequential model = make_mlp(DType::kF32);
    DistributedDataParallel ddp(model, world, tiny_buckets(100));
    if (hook) ddp.register_comm_hook(hook);
    const Samples mine = every(make_samples(6, DType::kF32), world.rank(), 3);
    for (int step = 0; step < 2; ++step) {
      model.clear_grad();
      world.clear_records();
      mse_loss(ddp(mine.x), mine.y).backward();
      for (const CommRecord& record : records_of(world, CommOp::kAllReduce)) {
        EXPECT_EQ(record.dtype, on_wire);
      }
    }
    return grads_of(model);
  });
}

TEST(DdpHook, TheAllReduceHookIsTheDefault) {
  const auto plain = grads_with_hook(nullptr, DType::kF32);
  EXPECT_EQ(grads_with_hook(ddp::all_reduce_hook(), DType::kF32), plain);
}

TEST(DdpHook, CompressionHalvesTheBytesAndRoundsToBf16) {
  const auto plain = grads_with_hook(nullptr, DType::kF32);
  const auto small = grads_with_hook(ddp::bf16_compress_hook(), DType::kBF16);
  EXPECT_EQ(small[0], small[2]);
  EXPECT_LT(largest_difference(small[0], plain[0]), 0.02);
  EXPECT_NE(small[0], plain[0]);
}

TEST(DdpHook, RegisteringAfterAForwardIsRefused) {
  EXPECT_TRUE(
      has_text(error_on_ranks(1,
                              [](ProcessGroup& world) {
                                Sequential model = make_mlp(DType::kF32);
                                DistributedDataParallel ddp(model, world);
                                ddp(make_samples(2, DType::kF32).x);
                                ddp.register_comm_hook(ddp::all_reduce_hook());
                              }),
               "register it before"));
}

// --- Failure ------------------------------------------------------------------------------

TEST(DdpFailure, ARankThatThrowsInBackwardStopsTheOthers) {
  const std::string error = error_on_ranks(3, [](ProcessGroup& world) {
    Sequential model = make_mlp(DType::kF32);
    DistributedDataParallel ddp(model, world);
    const Samples mine = every(make_samples(6, DType::kF32), world.rank(), 3);
    const Tensor output = ddp(mine.x);
    if (world.rank() == 1) {
      output.add_grad_hook([](const Tensor&) -> Tensor {
        SB_FAIL("the third rank's neighbour fell over");
      });
    }
    mse_loss(output, mine.y).backward();
  });
  EXPECT_TRUE(has_text(error, "neighbour fell over")) << error;
}

// --- Uneven inputs -------------------------------------------------------------------------

struct Joined {
  Values parameters;
  int num_steps = 0;
};

/// Rank r trains on counts[r] batches.
std::vector<Joined> train_uneven(const std::vector<int>& counts,
                                 const ddp::JoinOptions& join,
                                 const DdpOptions& options) {
  return on_ranks(static_cast<int>(counts.size()), [&](ProcessGroup& world) {
    Sequential model = make_mlp(DType::kF64);
    DistributedDataParallel ddp(model, world, options);
    const auto optimizer = make_optimizer("sgd", model.parameters(), {0.1});
    Joined result;
    ddp.join(
        [&] {
          const int count = counts[static_cast<std::size_t>(world.rank())];
          for (int step = 0; step < count; ++step) {
            const Samples mine =
                every(make_samples(2 * world.size(), DType::kF64,
                                   30 + static_cast<std::uint64_t>(step)),
                      world.rank(), world.size());
            mse_loss(ddp(mine.x), mine.y).backward();
            optimizer->step();
            model.clear_grad();
            result.num_steps += 1;
          }
        },
        join);
    result.parameters = values_of(model.parameters());
    return result;
  });
}

/// The same on one device, rank after rank.
Values train_uneven_reference(const std::vector<int>& counts, bool by_initial) {
  Sequential model = make_mlp(DType::kF64);
  const auto optimizer = make_optimizer("sgd", model.parameters(), {0.1});
  const int d = static_cast<int>(counts.size());
  for (int step = 0;; ++step) {
    int active = 0;
    for (const int count : counts) active += step < count;
    if (active == 0) return values_of(model.parameters());
    for (int r = 0; r < d; ++r) {
      if (step >= counts[static_cast<std::size_t>(r)]) continue;
      const Samples mine =
          every(make_samples(2 * d, DType::kF64,
                             30 + static_cast<std::uint64_t>(step)),
                r, d);
      scale(mse(model, mine), 1.0 / (by_initial ? d : active)).backward();
    }
    optimizer->step();
    model.clear_grad();
  }
}

TEST(DdpJoin, EarlyFinishersAnswerForTheRanksThatHaveMore) {
  DdpOptions views = tiny_buckets(100);
  views.gradient_as_bucket_view = true;
  DdpOptions unused = tiny_buckets(100);
  unused.find_unused_parameters = true;
  DdpOptions static_graph = tiny_buckets(100);
  static_graph.static_graph = true;
  for (const std::vector<int>& counts :
       {std::vector<int>{1, 4, 2}, {0, 3}, {3, 0}, {2, 2}, {3}, {0, 0}}) {
    for (const bool by_initial : {true, false}) {
      ddp::JoinOptions join;
      join.divide_by_initial_world_size = by_initial;
      const Values expected = train_uneven_reference(counts, by_initial);
      for (const DdpOptions& options :
           {DdpOptions{}, views, unused, static_graph}) {
        const auto ranks = train_uneven(counts, join, options);
        for (std::size_t r = 0; r < ranks.size(); ++r) {
          EXPECT_EQ(ranks[r].num_steps, counts[r]);
          EXPECT_LT(largest_difference(ranks[r].parameters, expected), 1e-12)
              << "rank " << r << " of " << ranks.size() << ", by initial "
              << by_initial;
        }
      }
    }
  }
}

TEST(DdpJoin, AccumulationAndBuffersWorkInside) {
  const auto ranks = on_ranks(2, [](ProcessGroup& world) {
    Sequential model;
    model.add(Linear("0", 5, 3, init_of(DType::kF64)));
    model.add(BatchNorm(3, init_of(DType::kF64)));
    DistributedDataParallel ddp(model, world);
    const auto optimizer = make_optimizer("sgd", model.parameters(), {0.1});
    ddp.join([&] {
      for (int step = 0; step < 2 + 2 * world.rank(); ++step) {
        const Samples mine =
            every(make_samples(8, DType::kF64), world.rank(), 2);
        {
          auto no_sync = ddp.no_sync();
          mse_loss(ddp(mine.x), mine.y).backward();
        }
        mse_loss(ddp(mine.x), mine.y).backward();
        optimizer->step();
        model.clear_grad();
      }
    });
    Values all = values_of(model.parameters());
    const Values buffers = values_of(model.buffers());
    all.insert(all.end(), buffers.begin(), buffers.end());
    return all;
  });
  EXPECT_EQ(ranks[0], ranks[1]);
}

TEST(DdpJoin, ThrowsEverywhereOnEarlyTerminationWhenAsked) {
  ddp::JoinOptions join;
  join.throw_on_early_termination = true;
  try {
    train_uneven({3, 1}, join, {});
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_TRUE(has_text(error.what(), "rank 1 has no more batches"))
        << error.what();
  }
}

TEST(DdpTrap, UnevenInputsWithoutJoinFailAndNameTheRankThatLeft) {
  const std::string error = error_on_ranks(2, [](ProcessGroup& world) {
    Sequential model = make_mlp(DType::kF64);
    DistributedDataParallel ddp(model, world);
    for (int step = 0; step < 1 + world.rank(); ++step) {
      const Samples mine = every(make_samples(4, DType::kF64), world.rank(), 2);
      mse_loss(ddp(mine.x), mine.y).backward();
    }
  });
  EXPECT_TRUE(has_text(error, "rank 0")) << error;
}

}  // namespace
}  // namespace shardbook::ddp_test
