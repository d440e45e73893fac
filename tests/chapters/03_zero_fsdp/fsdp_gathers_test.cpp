// The order of FSDP's gathers and reductions, and the waits between streams.

#include <gtest/gtest.h>

#include <algorithm>

#include "core/stream.h"
#include "tests/chapters/03_zero_fsdp/fsdp_support.h"

namespace shardbook::fsdp_test {
namespace {

using fsdp::BackwardPrefetch;

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
    for (const CommRecord& each : records_of(world, CommOp::kReduceScatter)) {
      EXPECT_EQ(each.phase, Phase::kBackward);
    }
    Labels labels = labels_of(world.records());
    for (std::string& label : labels) {
      const auto at = label.find("transformer.");
      if (at != std::string::npos) label.erase(at, 12);
    }
    return labels;
  })[0];
}

FsdpOptions blocks() { return {.auto_wrap_policy = every_block()}; }

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
  // Recomputation causes no further gathers
  EXPECT_EQ(gathers(blocks(), 1, true), pre);
}

TEST(FsdpGathers, OrAfterItOrWhenItIsNeeded) {
  FsdpOptions post = blocks();
  post.backward_prefetch = BackwardPrefetch::kPost;
  EXPECT_EQ(gathers(post), gathers(blocks()));
  post.backward_prefetch = BackwardPrefetch::kNone;
  EXPECT_EQ(
      gathers(post),
      after_forward({"gather h.2", "reduce h.2", "gather h.1", "reduce h.1",
                     "gather h.0", "reduce h.0", "reduce root"}));
}

/// A unit with a weight of its own and two layers that are units themselves.
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

/// Returns in backward whether a unit is sharded while the model's own last
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

Prefetched prefetched(BackwardPrefetch setup) {
  return on_ranks(2, [setup](ProcessGroup& world) {
    Nested model;
    FullyShardedDataParallel fsdp(
        model, world,
        {.auto_wrap_policy =
             fsdp::transformer_auto_wrap_policy({"Linear", "Outer"}),
         .backward_prefetch = setup});
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
    result.labels = labels_of(world.records());
    return result;
  })[0];
}

// Backward visits units in the reverse order of the ends of their forwards: the
// root is followed by its last unit, an outer unit by its last inner one.
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
  const FsdpOptions options{.auto_wrap_policy = every_linear()};
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
  });
  on_ranks(8, [](ProcessGroup& world) {
    Sequential model = toy_net();
    const auto sharded = fsdp::fully_shard(model, {&model[1]}, world);
    sum((*sharded)(Tensor::full({2, 8}, world.rank()))).backward();
    // Rows of 8: [8,4] 4, [4] 1, [16,4] 8, [4] 1; and [4,16] 16, [16] 2
    EXPECT_EQ(numels(world.records()),
              (Numels{8 * 14, 8 * 18, 8 * 18, 8 * 18, 8 * 14}));
  });
}

/// Which streams wait for which, as issued.
class StreamLog : public Observer {
 public:
  void on_event_record(int stream, EventTime& time) override {
    time.s = 1 + stream;
  }
  void on_event_wait(int stream, const EventTime& time) override {
    waits.emplace_back(stream, static_cast<int>(time.s) - 1);
  }
  void on_event_synchronize(const EventTime&) override { ++synchronized; }
  std::vector<std::pair<int, int>> waits;  ///< (waiting stream, awaited stream)
  int synchronized = 0;
};

StreamLog streams_of(bool limits) {
  return on_ranks(2, [limits](ProcessGroup& world) {
    Gpt model(tiny_gpt_config(), init_of(DType::kF32));
    FsdpOptions options = blocks();
    options.limit_all_gathers = limits;
    FullyShardedDataParallel fsdp(model, world, options);
    const auto log = std::make_shared<StreamLog>();
    RankContext::current().add_observer(log);
    const Batch mine = tokens_of(4, 1, world.rank(), 2);
    language_loss(fsdp(mine.inputs), mine.targets).backward();
    RankContext::current().remove_observer(log);
    return *log;
  })[0];
}

TEST(FsdpStreams, TheHostWaitsWhenTwoFreedUnitsAreNotYetThroughAtTheDevice) {
  // Gathers 1 to 7 (root, 3 forward, 3 backward): from the fourth on, two units
  // are free when a gather is issued
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
    FullyShardedDataParallel fsdp(model, world,
                                  {.auto_wrap_policy = every_linear()});
    NoGrad no_grad;
    fsdp(Tensor::full({2, 8}, 1));
    EXPECT_EQ(
        RankContext::current().device.memory().current(MemoryKind::kParameter),
        (18 + 40 + 34) * 4);
  });
}

}  // namespace
}  // namespace shardbook::fsdp_test
