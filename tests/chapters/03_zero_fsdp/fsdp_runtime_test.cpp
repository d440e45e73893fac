// Units: layouts, wrapping, what is gathered when, and what is refused.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "chapters/03_zero_fsdp/fsdp/fully_shard.h"
#include "core/stream.h"
#include "tests/chapters/03_zero_fsdp/fsdp_support.h"

namespace shardbook::fsdp_test {
namespace {

using fsdp::auto_wrap;
using fsdp::BackwardPrefetch;
using Labels = std::vector<std::string>;

// --- Layouts --------------------------------------------------------------------

/// 8-4-16-4: parameters of 32, 4, 64, 16, 64, 4 elements.
const std::vector<Shape> kToyShapes = {{8, 4}, {4},     {4, 16},
                                       {16},   {16, 4}, {4}};

Sequential toy_net(DType dtype = DType::kF32) {
  Sequential model;
  model.add(Linear("0", 8, 4, init_of(dtype)));
  model.add(Linear("1", 4, 16, init_of(dtype)));
  model.add(Linear("2", 16, 4, init_of(dtype)));
  return model;
}

TEST(FsdpLayout, GoldenNumbersOfTheToyNet) {
  const fsdp::ShardLayout three = fsdp::flat_layout(kToyShapes, 3);
  EXPECT_EQ(three.numel, 184);
  EXPECT_EQ(three.shard_numel, 62);
  EXPECT_EQ(three.full_numel(), 186);
  EXPECT_EQ(three.real_numel(0), 62);
  EXPECT_EQ(three.real_numel(1), 62);
  EXPECT_EQ(three.real_numel(2), 60);
  EXPECT_EQ(fsdp::flat_layout(kToyShapes, 8).shard_numel, 23);

  // Fewer elements than a multiple: short and empty shards
  const fsdp::ShardLayout five = fsdp::flat_layout({{5}}, 4);
  EXPECT_EQ(five.shard_numel, 2);
  for (int r = 0; r < 4; ++r) {
    EXPECT_EQ(
        five.real_numel(r),
        std::vector<std::int64_t>({2, 2, 1, 0})[static_cast<std::size_t>(r)]);
  }
}

TEST(FsdpLayout, EveryElementHasOneOwnerAndItsPlace) {
  for (const int d : {1, 2, 3, 4, 8, 200}) {
    for (const bool rows : {false, true}) {
      const fsdp::ShardLayout layout = rows ? fsdp::row_layout(kToyShapes, d)
                                            : fsdp::flat_layout(kToyShapes, d);
      for (std::size_t i = 0; i < layout.size(); ++i) {
        std::int64_t next = 0;
        for (int r = 0; r < d; ++r) {
          const fsdp::Piece piece = layout.piece(i, r);
          EXPECT_LE(piece.shard_offset + piece.numel(), layout.shard_numel);
          if (piece.numel() == 0) continue;
          EXPECT_EQ(piece.begin, next);
          next = piece.end;
          if (rows) continue;
          // x -> owner x div S, offset x mod S
          const std::int64_t x = layout.full_offset[i] + piece.begin;
          EXPECT_EQ(r, x / layout.shard_numel);
          EXPECT_EQ(piece.shard_offset, x % layout.shard_numel);
        }
        EXPECT_EQ(next, shape_numel(layout.shapes[i]));
      }
    }
  }
}

TEST(FsdpLayout, RowsAreCutByCeilAndRanksMayBeEmpty) {
  const fsdp::ShardLayout layout = fsdp::row_layout({{5, 3}, {2}}, 4);
  EXPECT_EQ(layout.chunk, (Numels{6, 1}));
  EXPECT_EQ(layout.shard_numel, 7);
  EXPECT_EQ(layout.piece(0, 2).numel(), 3);
  EXPECT_EQ(layout.piece(0, 3).numel(), 0);
  EXPECT_EQ(layout.piece(1, 2).numel(), 0);
}

// --- Wrapping -------------------------------------------------------------------

std::size_t units_by_size(std::int64_t min_num_params) {
  Sequential model = toy_net();
  return auto_wrap(model, fsdp::size_based_auto_wrap_policy(min_num_params))
      .size();
}

TEST(FsdpWrap, TheToyNetIsOneUnitUnlessTheLimitIsLowered) {
  EXPECT_EQ(units_by_size(100'000'000), 0u);
  // 36, 80, 68: the children that are large enough
  EXPECT_EQ(units_by_size(70), 1u);
  EXPECT_EQ(units_by_size(60), 2u);
  EXPECT_EQ(units_by_size(36), 3u);
}

TEST(FsdpWrap, AParentCountsWhatItsChildrenLeft) {
  Sequential inner = toy_net();
  Sequential outer;
  outer.add(std::move(inner));
  // Of 184, the child of 80 is wrapped first: 104 are left
  EXPECT_EQ(auto_wrap(outer, fsdp::size_based_auto_wrap_policy(80)).size(), 2u);
  EXPECT_EQ(auto_wrap(outer,
                      fsdp::size_based_auto_wrap_policy(80, {}, {"Sequential"}))
                .size(),
            1u);
  EXPECT_EQ(auto_wrap(outer, fsdp::size_based_auto_wrap_policy(105)).size(),
            1u);
  EXPECT_TRUE(
      auto_wrap(outer, fsdp::size_based_auto_wrap_policy(10, {"Sequential"}))
          .empty());
}

TEST(FsdpWrap, ByHandInsideItsScopeOnlyAndOverridesWin) {
  Sequential model = toy_net();
  fsdp::WrapPlan plan;
  wrap(plan, model[0]);
  EXPECT_TRUE(plan.units().empty());
  fsdp::UnitOptions host;
  host.offload_params = true;
  {
    fsdp::EnableWrap scope(plan, host);
    wrap(plan, model[0]);
    wrap(plan, model[1], fsdp::UnitOptions{});
  }
  wrap(plan, model[2]);
  ASSERT_EQ(plan.units().size(), 2u);
  EXPECT_TRUE(plan.units()[0].options->offload_params);
  EXPECT_FALSE(plan.units()[1].options->offload_params);
  on_ranks(2, [&](ProcessGroup& world) {
    Sequential own = toy_net();
    fsdp::WrapPlan own_plan;
    {
      fsdp::EnableWrap scope(own_plan);
      wrap(own_plan, own[1]);
    }
    FullyShardedDataParallel fsdp(own, world, {}, own_plan);
    EXPECT_EQ(fsdp.units().size(), 2u);
    EXPECT_EQ(fsdp.units()[0]->layout().numel, 36 + 68);
    EXPECT_EQ(fsdp.units()[1]->layout().numel, 80);
    return 0;
  });
}

/// Two modules that share one table.
class Tied : public ModuleOf<Tied> {
 public:
  Tied() : a("a", 4, 4, init_of(DType::kF64), false), b(a) {}
  Tensor forward(const Tensor& x) override { return b(relu(a(x))); }
  void members(MemberVisitor& visit) override {
    visit.module("a", a);
    visit.module("b", b);
  }
  Linear a, b;
};

TEST(FsdpWrap, TiedParametersMustLieInOneUnit) {
  const std::string error = error_on_ranks(2, [](ProcessGroup& world) {
    Tied model;
    FsdpOptions options;
    options.auto_wrap_policy = every_linear();
    FullyShardedDataParallel fsdp(model, world, options);
  });
  EXPECT_TRUE(has_text(error,
                       "'a.weight' of unit 'a' and 'b.weight' of unit "
                       "'b' are one tensor"))
      << error;
  const auto grads = on_ranks(2, [](ProcessGroup& world) {
    Tied model;
    FullyShardedDataParallel fsdp(model, world);
    EXPECT_EQ(fsdp.units()[0]->layout().numel, 16);
    sum(fsdp(Tensor::full({2, 4}, 1.0 + world.rank(), {DType::kF64, {}})))
        .backward();
    return fsdp.clip_grad_norm_(1e9);
  });
  Tied one;
  scale(add(sum(one(Tensor::full({2, 4}, 1, {DType::kF64, {}}))),
            sum(one(Tensor::full({2, 4}, 2, {DType::kF64, {}})))),
        0.5)
      .backward();
  EXPECT_NEAR(grads[0], grad_norm(one.parameters()), 1e-12);
}

// --- Gathers --------------------------------------------------------------------

Labels gathers(const FsdpOptions& options, int steps = 1,
               bool recompute = false) {
  return on_ranks(2, [&](ProcessGroup& world) {
    Gpt model(tiny_gpt_config(), init_of(DType::kF32));
    set_recompute(model, recompute);
    FullyShardedDataParallel fsdp(model, world, options);
    for (int step = 0; step < steps; ++step) {
      world.clear_records();
      const Batch mine = tokens_of(4, 1, world.rank(), 2);
      language_loss(fsdp(mine.inputs), mine.targets).backward();
    }
    Labels labels;
    for (const CommRecord& record : world.records()) {
      std::string label = record.label;
      const auto at = label.find("transformer.");
      if (at != std::string::npos) label.erase(at, 12);
      labels.push_back(label);
      EXPECT_EQ(record.phase, record.op == CommOp::kReduceScatter
                                  ? Phase::kBackward
                                  : record.phase);
    }
    return labels;
  })[0];
}

FsdpOptions blocks() {
  FsdpOptions options;
  options.auto_wrap_policy = every_block();
  return options;
}

const Labels kForward = {"gather root", "gather h.0", "gather h.1",
                         "gather h.2"};

Labels after_forward(const Labels& backward) {
  Labels all = kForward;
  all.insert(all.end(), backward.begin(), backward.end());
  return all;
}

TEST(FsdpGathers, TheNextUnitOfBackwardIsAskedForBeforeThisOneComputes) {
  const Labels pre =
      after_forward({"gather h.2", "gather h.1", "reduce h.2", "gather h.0",
                     "reduce h.1", "reduce h.0", "reduce root"});
  EXPECT_EQ(gathers(blocks()), pre);
  EXPECT_EQ(gathers(blocks(), 3), pre);
  // Recomputed blocks are gathered no more often
  EXPECT_EQ(gathers(blocks(), 1, true), pre);
}

TEST(FsdpGathers, OrAfterItOrWhenItIsNeeded) {
  FsdpOptions post = blocks();
  post.backward_prefetch = BackwardPrefetch::kPost;
  const Labels late =
      after_forward({"gather h.2", "gather h.1", "reduce h.2", "gather h.0",
                     "reduce h.1", "reduce h.0", "reduce root"});
  EXPECT_EQ(gathers(post), late);
  post.backward_prefetch = BackwardPrefetch::kNone;
  EXPECT_EQ(
      gathers(post),
      after_forward({"gather h.2", "reduce h.2", "gather h.1", "reduce h.1",
                     "gather h.0", "reduce h.0", "reduce root"}));
}

/// A unit of its own weight and of two layers, which are units as well.
class Outer : public ModuleOf<Outer> {
 public:
  Outer()
      : first("first", 5, 5, init_of(DType::kF32)),
        second("second", 5, 5, init_of(DType::kF32)),
        weight(make_parameter("weight", {5}, 1, init_of(DType::kF32))) {}
  Tensor forward(const Tensor& x) override {
    return mul(second(first(x)), weight);
  }
  void members(MemberVisitor& visit) override {
    visit.module("first", first);
    visit.module("second", second);
    visit.parameter("weight", weight);
  }
  std::string type_name() const override { return "Outer"; }
  Linear first, second;
  Tensor weight;
};

/// Tells in backward whether a unit is in shards while the model's own last
/// operation computes.
class Nested : public ModuleOf<Nested> {
 public:
  Nested()
      : before("before", 5, 5, init_of(DType::kF32)),
        weight(make_parameter("weight", {5}, 1, init_of(DType::kF32))) {}
  Tensor forward(const Tensor& x) override {
    const Tensor y = mul(outer(before(x)), weight);
    return autograd::custom_function(
        "probe", {y}, [](const Tensors& inputs) { return inputs; },
        [this](const Tensors& grads) {
          if (probe) probe();
          return grads;
        })[0];
  }
  void members(MemberVisitor& visit) override {
    visit.module("before", before);
    visit.module("outer", outer);
    visit.parameter("weight", weight);
  }
  Linear before;
  Outer outer;
  Tensor weight;
  std::function<void()> probe;
};

struct Prefetched {
  Labels labels;
  bool is_outer_gathered_at_the_root = false;
};

Prefetched prefetched(BackwardPrefetch how) {
  return on_ranks(2, [how](ProcessGroup& world) {
    Nested model;
    FsdpOptions options;
    options.backward_prefetch = how;
    options.auto_wrap_policy =
        fsdp::transformer_auto_wrap_policy({"Linear", "Outer"});
    FullyShardedDataParallel fsdp(model, world, options);
    Prefetched result;
    model.probe = [&] {
      for (const fsdp::FlatParameter* unit : fsdp.units()) {
        if (unit->name() == "outer") {
          result.is_outer_gathered_at_the_root = !unit->is_sharded();
        }
      }
    };
    const Tensor output = fsdp(Tensor::full({2, 5}, 1.0 + world.rank()));
    world.clear_records();
    sum(output).backward();
    for (const CommRecord& record : world.records()) {
      result.labels.push_back(record.label);
    }
    return result;
  })[0];
}

// Backward meets units in the reverse order in which their forwards ended:
// after the root comes its last unit, after a unit around others the last of
// those.
TEST(FsdpGathers, BackwardPrefetchesInTheReverseOrderOfFinishedForwards) {
  const Prefetched pre = prefetched(BackwardPrefetch::kPre);
  EXPECT_EQ(
      pre.labels,
      (Labels{"gather outer", "gather outer.second", "gather outer.first",
              "reduce outer.second", "gather before", "reduce outer.first",
              "reduce outer", "reduce before", "reduce root"}));
  EXPECT_TRUE(pre.is_outer_gathered_at_the_root);
  const Prefetched none = prefetched(BackwardPrefetch::kNone);
  EXPECT_EQ(
      none.labels,
      (Labels{"gather outer", "gather outer.second", "reduce outer.second",
              "gather outer.first", "reduce outer.first", "reduce outer",
              "gather before", "reduce before", "reduce root"}));
  EXPECT_FALSE(none.is_outer_gathered_at_the_root);
}

TEST(FsdpGathers, ShardGradOpGathersOnceAndNoShardNever) {
  FsdpOptions options = blocks();
  options.sharding_strategy = ShardingStrategy::kShardGradOp;
  EXPECT_EQ(gathers(options), after_forward({"reduce h.2", "reduce h.1",
                                             "reduce h.0", "reduce root"}));
  options.sharding_strategy = ShardingStrategy::kNoShard;
  EXPECT_EQ(gathers(options), (Labels{"replicas h.2", "replicas h.1",
                                      "replicas h.0", "replicas root"}));
}

TEST(FsdpGathers, UnitsInsideARecomputedBlockAreGatheredTwiceToo) {
  FsdpOptions options;
  options.auto_wrap_policy = every_linear();
  const Labels plain = gathers(options), again = gathers(options, 1, true);
  auto count = [](const Labels& labels, const std::string& label) {
    return std::count(labels.begin(), labels.end(), label);
  };
  for (const char* unit : {"h.0.attn.c_attn", "h.2.mlp.c_proj"}) {
    EXPECT_EQ(count(plain, std::string("gather ") + unit), 2) << unit;
    EXPECT_EQ(count(again, std::string("gather ") + unit), 2) << unit;
    EXPECT_EQ(count(again, std::string("reduce ") + unit), 1) << unit;
  }
}

TEST(FsdpGathers, LengthsArePaddedAndExact) {
  on_ranks(3, [](ProcessGroup& world) {
    Sequential model = toy_net();
    FullyShardedDataParallel fsdp(model, world);
    EXPECT_TRUE(world.records().empty());
    sum(fsdp(Tensor::full({2, 8}, world.rank()))).backward();
    EXPECT_EQ(numels(world.records()), (Numels{186, 186}));
    return 0;
  });
  on_ranks(8, [](ProcessGroup& world) {
    Sequential model = toy_net();
    const auto sharded = fsdp::fully_shard(model, {&model[1]}, world);
    sum((*sharded)(Tensor::full({2, 8}, world.rank()))).backward();
    // Rows of 8: [8,4] 4, [4] 1, [16,4] 8, [4] 1; and [4,16] 16, [16] 2
    EXPECT_EQ(numels(world.records()),
              (Numels{8 * 14, 8 * 18, 8 * 18, 8 * 18, 8 * 14}));
    return 0;
  });
}

/// Which streams wait for which, as issued.
class StreamLog : public Observer {
 public:
  void on_event_record(int stream, double& time_s) override {
    time_s = 1 + stream;
  }
  void on_event_wait(int stream, double time_s) override {
    waits.emplace_back(stream, static_cast<int>(time_s) - 1);
  }
  void on_event_synchronize(double) override { ++synchronized; }
  std::vector<std::pair<int, int>> waits;  ///< (who, for whom)
  int synchronized = 0;
};

StreamLog streams_of(bool limits) {
  return on_ranks(2, [limits](ProcessGroup& world) {
    Gpt model(tiny_gpt_config(), init_of(DType::kF32));
    FsdpOptions options = blocks();
    options.limit_all_gathers = limits;
    FullyShardedDataParallel fsdp(model, world, options);
    StreamLog log;
    RankContext::current().add_observer(&log);
    const Batch mine = tokens_of(4, 1, world.rank(), 2);
    language_loss(fsdp(mine.inputs), mine.targets).backward();
    RankContext::current().remove_observer(&log);
    return log;
  })[0];
}

TEST(FsdpStreams, TheHostWaitsWhenTwoFreedUnitsAreNotYetThroughAtTheDevice) {
  // Gathers 1 to 7 (root, 3 forward, 3 backward); 2 units are free when the
  // fourth is issued, and from then on
  EXPECT_EQ(streams_of(true).synchronized, 3);
  EXPECT_EQ(streams_of(false).synchronized, 0);
}

TEST(FsdpStreams, GathersWaitForTheLastUpdateReductionsForBackward) {
  std::vector<std::pair<int, int>> want = {{kUnshardStream, kComputeStream}};
  for (int unit = 0; unit < 4; ++unit) {
    want.emplace_back(kReduceStream, kComputeStream);
  }
  want.emplace_back(kComputeStream, kReduceStream);
  EXPECT_EQ(streams_of(true).waits, want);
}

TEST(FsdpGathers, EvaluationKeepsNothing) {
  on_ranks(2, [](ProcessGroup& world) {
    Sequential model = toy_net();
    FsdpOptions options;
    options.auto_wrap_policy = every_linear();
    FullyShardedDataParallel fsdp(model, world, options);
    const auto before =
        RankContext::current().device.memory().current(MemoryKind::kParameter);
    NoGrad no_grad;
    fsdp(Tensor::full({2, 8}, 1));
    EXPECT_EQ(
        RankContext::current().device.memory().current(MemoryKind::kParameter),
        before);
    EXPECT_EQ(before, (18 + 40 + 34) * 4);
    return 0;
  });
}

// --- Modules used otherwise than once ---------------------------------------------

class Uses : public ModuleOf<Uses> {
 public:
  Uses()
      : a("a", 5, 5, init_of(DType::kF64)),
        b("b", 5, 5, init_of(DType::kF64)),
        c("c", 5, 3, init_of(DType::kF64)) {}
  Tensor forward(const Tensor& x) override {
    Tensor y = x;
    for (const char name : use) y = relu(name == 'a' ? a(y) : b(y));
    return c(y);
  }
  void members(MemberVisitor& visit) override {
    visit.module("a", a);
    visit.module("b", b);
    visit.module("c", c);
  }
  Linear a, b, c;
  std::string use = "ab";
};

struct Used {
  Labels labels;
  Values parameters;
  std::vector<bool> has_grad;
};

Used run_uses(const std::string& use, const FsdpOptions& base = {}) {
  return on_ranks(2, [&](ProcessGroup& world) {
    Uses model;
    model.use = use;
    FsdpOptions options = base;
    options.auto_wrap_policy = every_linear();
    FullyShardedDataParallel fsdp(model, world, options);
    const Samples mine = every(make_samples(8, DType::kF64), world.rank(), 2);
    Used used;
    mse_loss(fsdp(mine.x), mine.y).backward();
    for (const CommRecord& record : world.records()) {
      used.labels.push_back(record.label);
    }
    for (const Tensor& shard : fsdp.parameters()) {
      used.has_grad.push_back(shard.grad().defined());
    }
    make_optimizer("sgd", fsdp.parameters(), {0.1})->step();
    used.parameters = whole_parameters(fsdp);
    return used;
  })[0];
}

Values one_device(const std::string& use) {
  Uses model;
  model.use = use;
  mse(model, make_samples(8, DType::kF64)).backward();
  make_optimizer("sgd", model.parameters(), {0.1})->step();
  return values_of(model.parameters());
}

TEST(FsdpUses, AModuleThatRunsTwiceIsGatheredTwiceAndReducedOnce) {
  for (const std::string use : {"aab", "aba"}) {
    const Used used = run_uses(use);
    EXPECT_LT(largest_difference(used.parameters, one_device(use)), 1e-12);
    auto count = [&](const std::string& label) {
      return std::count(used.labels.begin(), used.labels.end(), label);
    };
    EXPECT_EQ(count("gather a"), 3) << use;  // once more for backward
    EXPECT_EQ(count("reduce a"), 1) << use;
  }
}

TEST(FsdpUses, AUnitThatIsNotUsedHasNoGradientAndIsNotTouched) {
  const Used used = run_uses("a");
  EXPECT_EQ(used.has_grad, (std::vector<bool>{true, false, true}));
  EXPECT_LT(largest_difference(used.parameters, one_device("a")), 1e-12);
  EXPECT_EQ(std::count(used.labels.begin(), used.labels.end(), "gather b"), 0);
}

TEST(FsdpUses, RanksThatUseUnitsInAnotherOrderAreToldSo) {
  auto run = [](bool checks) {
    return error_on_ranks(2, [=](ProcessGroup& world) {
      Uses model;
      model.use = world.rank() == 0 ? "ab" : "ba";
      FsdpOptions options;
      options.auto_wrap_policy = every_linear();
      options.check_execution_order = checks;
      FullyShardedDataParallel fsdp(model, world, options);
      const Samples mine = every(make_samples(8, DType::kF64), world.rank(), 2);
      mse_loss(fsdp(mine.x), mine.y).backward();
    });
  };
  EXPECT_TRUE(has_text(run(true),
                       "rank 0 gathers unit 'a' where rank 1 "
                       "gathers 'b'"))
      << run(true);
}

// The trap: equal sizes in another order go through, with other values.
TEST(FsdpUses, WithoutTheCheckAnotherOrderOfEqualSizesGivesWrongValues) {
  const auto outputs = on_ranks(2, [](ProcessGroup& world) {
    Uses model;
    model.use = world.rank() == 0 ? "ab" : "ba";
    FsdpOptions options;
    options.auto_wrap_policy = every_linear();
    options.check_execution_order = false;
    FullyShardedDataParallel fsdp(model, world, options);
    std::string error;
    Values y;
    try {
      NoGrad no_grad;
      y = values_of({fsdp(make_samples(8, DType::kF64).x)});
    } catch (const Error& failure) {
      error = failure.what();
    }
    return std::pair(y, error);
  });
  Uses one;
  NoGrad no_grad;
  const Values right = values_of({one(make_samples(8, DType::kF64).x)});
  EXPECT_TRUE(!outputs[0].second.empty() || outputs[0].first != right);
}

// --- Frozen parameters ------------------------------------------------------------

TEST(FsdpFrozen, AUnitIsTrainedOrFrozenAsAWhole) {
  auto run = [](bool orig, bool rows) {
    return error_on_ranks(2, [=](ProcessGroup& world) {
      Uses model;
      model.a.weight.set_requires_grad(false);
      const Values frozen = model.a.weight.to_vector<double>();
      FsdpOptions options;
      options.auto_wrap_policy = every_linear();
      options.use_orig_params = orig;
      options.per_parameter = rows;
      FullyShardedDataParallel fsdp(model, world, options);
      const Samples mine = every(make_samples(8, DType::kF64), world.rank(), 2);
      mse_loss(fsdp(mine.x), mine.y).backward();
      OptimizerOptions decay;
      decay.weight_decay = 0.1;
      make_optimizer("adamw", fsdp.parameters(), decay)->step();
      const auto scope = fsdp.summon_full_params();
      EXPECT_EQ(model.a.weight.to_vector<double>(), frozen);
    });
  };
  EXPECT_TRUE(has_text(run(false, false),
                       "unit 'a' mixes the frozen and the "
                       "trained"));
  EXPECT_EQ(run(true, false), "");
  EXPECT_EQ(run(false, true), "");
}

TEST(FsdpFrozen, FrozenUnitsReduceNothing) {
  on_ranks(2, [](ProcessGroup& world) {
    Uses model;
    model.b.set_requires_grad(false);
    FsdpOptions options;
    options.auto_wrap_policy = every_linear();
    FullyShardedDataParallel fsdp(model, world, options);
    const Samples mine = every(make_samples(8, DType::kF64), world.rank(), 2);
    mse_loss(fsdp(mine.x), mine.y).backward();
    EXPECT_EQ(labels_of(world, CommOp::kReduceScatter),
              (Labels{"reduce c", "reduce a"}));
    EXPECT_EQ(fsdp.parameters().size(), 2u);
    return 0;
  });
}

// --- Between steps ----------------------------------------------------------------

TEST(FsdpSummon, ParametersAreReadAndWrittenInsideTheScopeOnly) {
  on_ranks(3, [](ProcessGroup& world) {
    Sequential model = toy_net();
    const Values before = values_of(model.parameters());
    FullyShardedDataParallel fsdp(model, world);
    EXPECT_THROW(model.parameters()[0].to_vector<float>(), Error);
    {
      const auto scope = fsdp.summon_full_params();
      EXPECT_EQ(values_of(model.parameters()), before);
      model.parameters()[0].fill(2);
    }
    {
      const auto scope = fsdp.summon_full_params(/*writeback=*/false);
      EXPECT_EQ(model.parameters()[0].to_vector<double>(), Values(32, 2.0));
      model.parameters()[0].fill(3);
    }
    EXPECT_EQ(whole_parameters(fsdp)[0], 2.0);
    return 0;
  });
}

TEST(FsdpPadding, IsZeroInGradientsWhateverTheMemoryHeld) {
  const auto norms = on_ranks(8, [](ProcessGroup& world) {
    Linear model("0", 1, 5, init_of(DType::kF64), /*with_bias=*/false);
    // Memory that the gradients will get again
    {
      MemoryScope kind(MemoryKind::kGradient);
      Tensor::full({8}, 1e9, {DType::kF64, Device()});
    }
    FullyShardedDataParallel fsdp(model, world);
    sum(fsdp(Tensor::full({2, 1}, 1, {DType::kF64, Device()}))).backward();
    return fsdp.clip_grad_norm_(1e12);
  });
  for (const double norm : norms) EXPECT_NEAR(norm, 2 * std::sqrt(5.0), 1e-12);
}

// The traps: one division after the sum overflows, one before it underflows.
TEST(FsdpDivision, NeitherAddendsNorSumLeaveTheRangeOfF16) {
  for (const double value : {30000.0, 2e-7}) {
    const auto grads = on_ranks(8, [value](ProcessGroup& world) {
      Linear model("0", 1, 8, init_of(DType::kF32), /*with_bias=*/false);
      FsdpOptions options;
      options.mixed_precision.reduce_dtype = DType::kF16;
      FullyShardedDataParallel fsdp(model, world, options);
      sum(fsdp(Tensor::full({1, 1}, value))).backward();
      return fsdp.parameters()[0].grad().to_vector<double>()[0];
    });
    for (const double grad : grads) {
      EXPECT_TRUE(std::isfinite(grad)) << value;
      EXPECT_NEAR(grad, value, value > 1 ? 30 : 1e-7);
    }
  }
  const TensorOptions f16{DType::kF16, Device()};
  EXPECT_FALSE(std::isfinite(Tensor::full({1}, 8 * 30000.0, f16).item()));
  EXPECT_EQ(Tensor::full({1}, 2e-7 / 8, f16).item(), 0);
}

// [exact] what stays between steps is table 3.1 with padded lengths.
TEST(FsdpMemory, ShardsGradientsAndStateAreSixteenBytesPerElement) {
  for (const int d : {2, 3, 4, 8}) {
    on_ranks(d, [d](ProcessGroup& world) {
      Sequential model = toy_net();
      FullyShardedDataParallel fsdp(model, world);
      model.replace_tensors(
          [](const std::string&, const Tensor& t) { return t; });
      const auto adam = make_optimizer("adamw", fsdp.parameters(), {});
      sum(fsdp(Tensor::full({2, 8}, 1))).backward();
      adam->step();
      const MemoryStats memory = RankContext::current().device.memory();
      const std::int64_t s = (184 + d - 1) / d;
      EXPECT_EQ(memory.current(MemoryKind::kParameter), 4 * s);
      EXPECT_EQ(memory.current(MemoryKind::kGradient), 4 * s);
      EXPECT_EQ(memory.current(MemoryKind::kOptimizerState), 8 * s);
      return 0;
    });
  }
}

TEST(FsdpOffload, CountsWhatCrossesToTheHostAndBack) {
  on_ranks(2, [](ProcessGroup& world) {
    Sequential model = toy_net();
    FsdpOptions options;
    options.auto_wrap_policy = every_linear();
    options.cpu_offload.offload_params = true;
    FullyShardedDataParallel fsdp(model, world, options);
    sum(fsdp(Tensor::full({2, 8}, 1))).backward();
    // Each Linear is gathered twice, and reduced once
    EXPECT_EQ(fsdp.host_traffic().to_device, 2 * 92 * 4);
    EXPECT_EQ(fsdp.host_traffic().to_host, 92 * 4);
    for (const Tensor& shard : fsdp.parameters()) {
      EXPECT_EQ(shard.device(), RankContext::current().host());
      EXPECT_EQ(shard.grad().device(), RankContext::current().host());
    }
    return 0;
  });
}

}  // namespace
}  // namespace shardbook::fsdp_test
