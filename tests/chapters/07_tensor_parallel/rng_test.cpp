// Megatron-LM's random streams: seeds, positions, and which dropout draws from
// which stream.

#include "chapters/07_tensor_parallel/rng.h"

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "chapters/07_tensor_parallel/tensor_parallel_strategy.h"
#include "chapters/common/run/training.h"
#include "chapters/common/sharded/sharded_strategy.h"
#include "tests/chapters/07_tensor_parallel/tensor_parallel_support.h"
#include "tests/chapters/common/sharded_support.h"
#include "tests/support/errors.h"

namespace shardbook::tensor_parallel {
namespace {

using sharded_test::expect_claims;
using sharded_test::report_of;
using sharded_test::small_gpt;

// --- Seeds and positions -----------------------------------------------------

TEST(RngStreams, SeedsAreThoseOfMegatron) {
  RngPlace place;
  place.tp = 3, place.pp = 2, place.dp = 5, place.ep = 4, place.expert_tp = 1;
  StreamSeeds seeds = megatron_seeds(1234, place);
  EXPECT_EQ(seeds.default_stream, 1434u);
  EXPECT_EQ(seeds.tensor, 1434u + 2718 + 3);
  EXPECT_EQ(seeds.expert, 1434u + 1024 + 400 + 1);
  // Replicas draw the same masks unless they are asked to differ
  place.replicas_differ = true;
  seeds = megatron_seeds(1234, place);
  EXPECT_EQ(seeds.default_stream, 1484u);
  EXPECT_EQ(seeds.tensor, 1484u + 2718 + 3);
}

/// The result of the next dropout, on 64 ones.
std::vector<double> next_mask() {
  return dropout(Tensor::full({64}, 1), 0.5).to_vector<double>();
}

std::vector<double> mask_of(RngTracker& rng, const std::string& name) {
  const RngTracker::Fork fork(rng, name);
  return next_mask();
}

TEST(RngStreams, EachKeepsItsPosition) {
  RankContext context;
  const RankContext::Scope scope(context);
  std::vector<std::vector<double>> default_masks, tensor_masks;
  for (int i = 0; i < 3; ++i) default_masks.push_back(next_mask());
  context.random = {};
  context.random.seed = 9;
  for (int i = 0; i < 3; ++i) tensor_masks.push_back(next_mask());
  EXPECT_NE(default_masks[0], default_masks[1]);
  EXPECT_NE(default_masks[0], tensor_masks[0]);

  // The same masks in turns
  context.random = {};
  RngTracker rng;
  rng.add(kTensorStream, 9);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(mask_of(rng, kTensorStream), tensor_masks[i]);
    EXPECT_EQ(next_mask(), default_masks[i]);
  }
}

TEST(RngStreams, AReplayMovesAllOfThemAndBack) {
  RankContext context;
  const RankContext::Scope scope(context);
  RngTracker rng;
  rng.add(kTensorStream, 9);
  const RngTracker::States begin = rng.states();
  const auto both = [&] {
    return std::vector{mask_of(rng, kTensorStream), next_mask()};
  };
  const auto first = both(), second = both();
  {
    const Replay replay(rng, begin);
    EXPECT_EQ(both(), first);
    EXPECT_EQ(both(), second);
  }
  const auto third = both();
  EXPECT_NE(third, first);
  EXPECT_NE(third, second);
}

TEST(RngStreams, NamesAndSeedsAreTakenOnce) {
  RankContext context;
  const RankContext::Scope scope(context);
  RngTracker rng;
  rng.add("one", 1);
  EXPECT_EQ(error_of([&] { rng.add("one", 2); }),
            "random stream 'one' exists already");
  EXPECT_EQ(error_of([&] { rng.add("two", 1); }),
            "random stream 'two': seed 1 is that of 'one'; give one that no "
            "stream has");
  EXPECT_EQ(error_of([&] { rng.fork("two"); }),
            "random stream 'two' does not exist; add it first");
  EXPECT_EQ(error_of([&] {
              const RngTracker::Fork fork(rng, "one");
              rng.fork("one");
            }),
            "random stream 'one': a fork inside of another one; end that "
            "first");
  mask_of(rng, "one");  // and ends well afterwards
}

// --- A model -----------------------------------------------------------------

Options with_dropout(int t) {
  Options options = small_gpt(t);
  options.dropout = 0.2;
  options.check = false;
  return options;
}

StrategyOptions with_streams() { return {.rng = "megatron"}; }

class RngStreamsOfRanks : public ::testing::TestWithParam<int> {};

TEST_P(RngStreamsOfRanks, WithoutDropoutTheRunIsThatOfOneDevice) {
  StrategyOptions setup = with_streams();
  expect_claims(report_of<TensorParallelStrategy>(small_gpt(GetParam()), setup),
                "streams");
  setup.recompute = true;
  setup.micro_batches = 2;
  expect_claims(report_of<TensorParallelStrategy>(small_gpt(GetParam()), setup),
                "recompute");
}

TEST_P(RngStreamsOfRanks, DropoutCostsWhatItCostsOtherwise) {
  for (const bool recompute : {false, true}) {
    StrategyOptions setup = with_streams();
    setup.recompute = recompute;
    const Report report =
        report_of<TensorParallelStrategy>(with_dropout(GetParam()), setup);
    EXPECT_FALSE(report.parity.checked);
    SCOPED_TRACE(recompute);
    sharded_test::expect_bill(report);
  }
}

/// By rank: all parameters after training by `make(tp, rng)`, or only the
/// replicated ones.
template <typename Make>
std::vector<std::vector<double>> trained(const Options& options,
                                         bool replicas_only, const Make& make) {
  return on_ranks(options.world_size, [&](ProcessGroup& tp) {
    RngTracker rng;
    auto strategy = make(tp, rng);
    train(options, strategy.optimizer(), false,
          [&](std::int64_t k) { return strategy.step(k); });
    std::vector<double> values;
    for (const NamedTensor& each : strategy.model().named_parameters()) {
      const Shards part = layout(strategy.config(), each.name, 0, tp.size());
      if (replicas_only && !part.empty()) continue;
      const auto mine = each.tensor.to_vector<double>();
      values.insert(values.end(), mine.begin(), mine.end());
    }
    return values;
  });
}

/// The parameters after the chapter's strategy has run, by rank.
std::vector<std::vector<double>> trained_with_streams(
    int t, bool replicas_only, bool recompute = false,
    std::int64_t micro_batches = 2) {
  const Options options = with_dropout(t);
  StrategyOptions setup = with_streams();
  setup.recompute = recompute;
  setup.micro_batches = micro_batches;
  return trained(options, replicas_only, [&](ProcessGroup& tp, RngTracker&) {
    return TensorParallelStrategy(options, setup, tp);
  });
}

TEST_P(RngStreamsOfRanks, ReplicasStayEqualBitForBit) {
  const auto replicas = trained_with_streams(GetParam(), true);
  for (const auto& each : replicas) EXPECT_EQ(each, replicas[0]);
}

TEST_P(RngStreamsOfRanks, RecomputationDrawsTheSameMasks) {
  EXPECT_EQ(trained_with_streams(GetParam(), false, true),
            trained_with_streams(GetParam(), false, false));
}

INSTANTIATE_TEST_SUITE_P(Ranks, RngStreamsOfRanks,
                         ::testing::Values(1, 2, 3, 4));

/// The first mask that each rank draws from one of its streams.
std::vector<std::vector<double>> masks_on_ranks(int t, bool in_tensor_stream) {
  return on_ranks(t, [&](ProcessGroup& tp) {
    RngPlace place;
    place.tp = tp.rank();
    const StreamSeeds seeds = megatron_seeds(7, place);
    RankContext::current().random.seed = seeds.default_stream;
    RngTracker rng;
    rng.add(kTensorStream, seeds.tensor);
    return in_tensor_stream ? mask_of(rng, kTensorStream) : next_mask();
  });
}

TEST(RngStreams, TheTensorStreamDiffersBetweenRanksAndTheDefaultDoesNot) {
  const auto same = masks_on_ranks(4, false), other = masks_on_ranks(4, true);
  for (std::size_t r = 1; r < 4; ++r) {
    EXPECT_EQ(same[r], same[0]);
    for (std::size_t q = 0; q < r; ++q) EXPECT_NE(other[r], other[q]);
  }
}

using Change = std::function<void(LayerFactory& layers, RngTracker& rng)>;

/// A GPT that draws from Megatron's streams; `wrong` may change its layers.
class GptByHand : public ShardedStrategy {
 public:
  GptByHand(const Options& options, ProcessGroup& tp, RngTracker& rng,
            const Change& wrong)
      : ShardedStrategy(options, sharded(options, tp, rng, wrong), tp, {1}) {}
  std::vector<Bill> bills() override { return {}; }

 private:
  static ShardedModel sharded(const Options& options, ProcessGroup& tp,
                              RngTracker& rng, const Change& wrong) {
    RngPlace place;
    place.tp = tp.rank();
    rng.add(kTensorStream, megatron_seeds(options.seed, place).tensor);
    ShardedModel model;
    model.layers = layers(model_config(options), tp, &rng);
    if (wrong) wrong(model.layers, rng);
    model.layout = [config = model_config(options), t = tp.size()](
                       const std::string& name, int rank) {
      return layout(config, name, rank, t);
    };
    return model;
  }
};

/// The same for a GPT by hand on two ranks.
std::vector<std::vector<double>> trained_by_hand(bool replicas_only,
                                                 const Change& wrong = {}) {
  const Options options = with_dropout(2);
  return trained(options, replicas_only,
                 [&](ProcessGroup& tp, RngTracker& rng) {
                   return GptByHand(options, tp, rng, wrong);
                 });
}

// The strategy's streams are Megatron's, seeded by rank.
TEST(RngStreams, TheStrategyDrawsFromTheStreamsOfItsRank) {
  EXPECT_EQ(trained_with_streams(2, false, false, 1), trained_by_hand(false));
}

TEST(RngStreams, OneDeviceDrawsTheSameMasksOnlyWithoutStreams) {
  EXPECT_FALSE(draws_as_one_device(with_dropout(2), with_streams()));
  EXPECT_TRUE(draws_as_one_device(small_gpt(2), with_streams()));
  EXPECT_TRUE(draws_as_one_device(with_dropout(2), {}));
}

// --- What goes wrong ---------------------------------------------------------

/// Dropout from a stream that differs between ranks.
class TensorStreamDropout : public ModuleOf<TensorStreamDropout> {
 public:
  TensorStreamDropout(double p, RngTracker& rng) : p_(p), rng_(&rng) {}
  Tensor forward(const Tensor& x) override {
    const RngTracker::Fork fork(*rng_, kTensorStream);
    return dropout(x, p_);
  }
  void members(MemberVisitor&) override {}

 private:
  double p_;
  RngTracker* rng_;
};

TEST(RngStreamTraps, TheTensorStreamOnReplicatedActivationsSplitsReplicas) {
  const auto right = trained_by_hand(true);
  EXPECT_EQ(right[0], right[1]);
  const auto wrong =
      trained_by_hand(true, [](LayerFactory& layers, RngTracker& rng) {
        layers.dropout = [&rng](double p) -> AnyModule {
          return {std::make_unique<TensorStreamDropout>(p, rng)};
        };
      });
  EXPECT_NE(wrong[0], wrong[1]);
}

}  // namespace
}  // namespace shardbook::tensor_parallel
