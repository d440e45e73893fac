// PipeDream, vertical sync, 2BW: ranks that update at different times compute
// the same as one device that applies the version rule.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "chapters/06_1f1b/asynchronous_reference.h"
#include "chapters/06_1f1b/untied.h"
#include "chapters/06_1f1b/weight_stash.h"
#include "chapters/common/models/models.h"
#include "chapters/common/pipeline/partition.h"
#include "core/check.h"
#include "tests/chapters/common/pipeline/pipeline_engine_support.h"
#include "tests/support/errors.h"
#include "tests/support/on_ranks.h"
#include "tests/support/sanitized.h"

namespace shardbook::pipeline_test {
namespace {

using pipeline::Schedule;
using pipeline::SequentialRule;
using pipeline::StashedUpdates;
using pipeline::VersionUse;
namespace schedules = pipeline::schedules;

struct AsynchronousOutcome {
  Values parameters;
  std::map<int, double> losses;
  std::vector<std::vector<VersionUse>> uses;  // by rank
  std::vector<std::size_t> kept;              // versions at the end
  std::vector<double> parameter_bytes, peak;  // of one version; counted
  bool replicas_agree = true;
};

/// A training: its options, layers, and the pieces of a batch.
struct AsynchronousTraining {
  Options options;
  std::shared_ptr<const LayerList> layers = std::make_shared<PairLayers>();
  std::vector<MicroBatch> pieces = ceil_micro_batches(4, 1);

  std::vector<int> cuts(int num_stages) const {
    return cut_uniform(layers->size(), num_stages);
  }
};

AsynchronousOutcome run_asynchronously(const Schedule& schedule,
                                       const AsynchronousTraining& training,
                                       bool stashes = true) {
  const Options& options = training.options;
  const auto cuts = training.cuts(schedule.num_stages);
  const auto p = static_cast<std::size_t>(schedule.num_ranks);
  AsynchronousOutcome all;
  all.uses.resize(p);
  all.kept.resize(p);
  all.parameter_bytes.resize(p);
  all.peak.resize(p);
  std::vector<Values> values(p);
  std::vector<std::map<int, double>> losses(p);
  shardbook::on_ranks(schedule.num_ranks, [&](ProcessGroup& world) {
    const auto r = static_cast<std::size_t>(world.rank());
    RankContext::current().random = random_of(options);
    const Dataset data = small_data(options);
    pipeline::LanguageFeed feed(options, data, training.pieces);
    PipelineModel model(options, training.layers,
                        pipeline::layout_of(schedule, cuts), world);
    const auto optimizer = make_optimizer(options.optimizer, model.parameters(),
                                          options.optimizer_options);
    StashedUpdates updates(schedule, model, *optimizer, world.rank(), stashes);
    pipeline::Engine engine(schedule, model, world, feed, &updates);
    engine.run();
    const int last = schedule.num_stages - 1;
    for (int b = 0; b < schedule.total_micro_batches(); ++b) {
      if (schedule.place(b, last).rank == world.rank()) {
        losses[r][b] = engine.loss(b);
      }
    }
    for (int s = 0; s <= last; ++s) {
      if (!model.holds(s)) continue;
      for (const NamedTensor& each : model.stage(s).named_parameters()) {
        values[r][each.name] = each.tensor.to_vector<double>();
        all.parameter_bytes[r] += static_cast<double>(each.tensor.bytes());
      }
    }
    all.uses[r] = updates.uses();
    all.kept[r] = updates.stash().size();
    all.peak[r] = static_cast<double>(
        RankContext::current().device.memory().peak(MemoryKind::kParameter));
  });
  for (std::size_t r = 0; r < p; ++r) {
    all.losses.insert(losses[r].begin(), losses[r].end());
    for (const auto& [name, list] : values[r]) {
      const auto [found, is_new] = all.parameters.emplace(name, list);
      all.replicas_agree = all.replicas_agree && found->second == list;
    }
  }
  return all;
}

void expect_bits(const AsynchronousOutcome& ranks, const ReferenceRun& one,
                 int micro_batches) {
  Values expected;
  for (const NamedTensor& each : one.parameters) {
    expected[each.name] = each.tensor.to_vector<double>();
  }
  EXPECT_EQ(ranks.parameters, expected);
  std::vector<double> losses(one.losses.size());
  for (const auto& [b, loss] : ranks.losses) {
    losses[static_cast<std::size_t>(b / micro_batches)] += loss;
  }
  // Sums of products may be fused, or not
  ASSERT_EQ(losses.size(), one.losses.size());
  for (std::size_t i = 0; i < losses.size(); ++i) {
    EXPECT_DOUBLE_EQ(losses[i], one.losses[i]);
  }
}

using Version = std::function<int(int stage, int micro_batch)>;

/// Trains in the pipeline; one device that applies the rule of versions has the
/// same bits.
AsynchronousOutcome expect_versions(const Schedule& schedule,
                                    const AsynchronousTraining& training,
                                    const Version& version,
                                    std::vector<int> replicas = {}) {
  const AsynchronousOutcome ranks = run_asynchronously(schedule, training);
  RankContext context(Device::cpu(0), 0, 1);
  context.deterministic = true;
  const RankContext::Scope scope(context);
  const int stages = schedule.num_stages;
  if (replicas.empty()) replicas.assign(static_cast<std::size_t>(stages), 1);
  const SequentialRule rule{training.cuts(stages), version, replicas};
  expect_bits(ranks,
              pipeline::train_sequentially(training.options, *training.layers,
                                           rule, training.pieces,
                                           small_data(training.options)),
              static_cast<int>(training.pieces.size()));
  return ranks;
}

Options training_options(std::int64_t batch, std::int64_t steps,
                         const std::string& optimizer) {
  Options options = small_options(batch);
  options.steps = steps;
  options.optimizer = optimizer;
  options.optimizer_options.lr = optimizer == "sgd" ? 0.1 : 0.01;
  options.optimizer_options.momentum = optimizer == "sgd" ? 0.9 : 0;
  return options;
}

class AsynchronousRanks : public ::testing::TestWithParam<int> {};

TEST_P(AsynchronousRanks, PipeDreamFollowsTheVersionFormula) {
  const int p = GetParam(), steps = p + 5;
  for (const bool vertical : {false, true}) {
    SCOPED_TRACE(vertical ? "vertical sync" : "stashing");
    // The optimizer's state (momentum, Adam's moments) has no versions
    const auto version = [&](int s, int b) {
      return std::max(0, b - (vertical ? p - 1 : p - 1 - s));
    };
    const auto ranks = expect_versions(
        schedules::pipedream(p, steps, vertical),
        {training_options(4, steps, vertical ? "adamw" : "sgd")}, version);
    for (int s = 0; s < p; ++s) {
      const auto& uses = ranks.uses[static_cast<std::size_t>(s)];
      ASSERT_EQ(uses.size(), static_cast<std::size_t>(steps));
      for (int b = 0; b < steps; ++b) {
        const VersionUse& use = uses[static_cast<std::size_t>(b)];
        EXPECT_EQ(use.micro_batch, b);
        EXPECT_EQ(use.forward, version(s, b));
        EXPECT_EQ(use.backward, version(s, b));
        EXPECT_EQ(use.newest, b);
        EXPECT_EQ(use.error, 0);
      }
      // p-s versions, p with vertical sync
      const auto at = static_cast<std::size_t>(s);
      EXPECT_EQ(ranks.peak[at],
                (vertical ? p : p - s) * ranks.parameter_bytes[at]);
    }
  }
}

TEST_P(AsynchronousRanks, DoubleBufferedWeightsHaveDelayOne) {
  const int p = GetParam(), m = p + 1, steps = 4;
  const auto version = [&](int, int b) {
    return pipeline::double_buffered_version(b, m);
  };
  AsynchronousTraining training{training_options(2 * m - 1, steps, "adamw")};
  training.pieces = ceil_micro_batches(2 * m - 1, m);
  const auto ranks =
      expect_versions(schedules::pipedream_2bw(p, m, steps), training, version);
  for (int s = 0; s < p; ++s) {
    const auto at = static_cast<std::size_t>(s);
    EXPECT_LE(ranks.peak[at], 2 * ranks.parameter_bytes[at]);
    for (const VersionUse& use : ranks.uses[at]) {
      EXPECT_EQ(use.forward, version(s, use.micro_batch));
      EXPECT_EQ(use.backward, use.forward);
    }
  }
}

// Without a stash, backward does not compute the gradient of any loss.
TEST_P(AsynchronousRanks, WithoutStashingGradientsAreWrong) {
  const int p = GetParam(), steps = p + 6;
  const AsynchronousTraining training{training_options(4, steps, "sgd")};
  const Schedule schedule = schedules::pipedream(p, steps);
  const auto with = run_asynchronously(schedule, training);
  const auto without =
      run_asynchronously(schedule, training, /*stashes=*/false);
  EXPECT_EQ(with.parameters == without.parameters, p == 1);
  for (int s = 0; s < p; ++s) {
    double worst = 0;
    for (const VersionUse& use : without.uses[static_cast<std::size_t>(s)]) {
      EXPECT_EQ(use.backward, use.newest);
      worst = std::max(worst, use.error);
    }
    // The last stage is never stale; with 8, some have no weights
    if (s == p - 1) {
      EXPECT_EQ(worst, 0);
    } else if (p <= 4) {
      EXPECT_GT(worst, 1e-4) << "stage " << s;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(WorldSizes, AsynchronousRanks,
                         ::testing::ValuesIn(world_sizes()));

// Forward, backward, step, without any code of this chapter.
TEST(AsynchronousTest, OneRankIsPlainSgd) {
  const AsynchronousTraining training{training_options(4, 5, "sgd")};
  const Options& options = training.options;
  ReferenceRun plain;
  {
    RankContext context(Device::cpu(0), 0, 1);
    context.deterministic = true;
    const RankContext::Scope scope(context);
    context.random = random_of(options);
    InitOptions init;
    init.seed = options.seed;
    init.dtype = options.dtype;
    Stage model(*training.layers, 0, kLayers, init);
    const auto optimizer =
        make_optimizer("sgd", model.parameters(), options.optimizer_options);
    const Dataset data = small_data(options);
    for (int step = 0; step < 5; ++step) {
      context.random.step = static_cast<std::uint64_t>(step);
      context.random.batch = training.pieces[0].slice;
      context.random.next_op = 0;
      const Batch batch = data.batch(step, options.batch);
      const Tensor loss =
          language_loss(model(Tensors{batch.inputs})[0], batch.targets);
      plain.losses.push_back(loss.item());
      autograd::backward({loss}, {Tensor::full({}, 1, loss.options())});
      optimizer->step();
      for (const Tensor& each : model.parameters()) each.clear_grad();
    }
    plain.parameters = model.named_parameters();
  }
  expect_bits(run_asynchronously(schedules::pipedream(1, 5), training), plain,
              1);
}

/// The version that a mini-batch reads, counted by the rule: before its update,
/// a stage of R ranks runs ceil(ranks of later stages / R) rounds of R
/// forwards.
int read_version(const std::vector<int>& replicas, int stage, int b) {
  const auto s = static_cast<std::size_t>(stage);
  int behind = 0;
  for (std::size_t i = s + 1; i < replicas.size(); ++i) behind += replicas[i];
  int rounds_ahead = 0;
  while (rounds_ahead * replicas[s] < behind) ++rounds_ahead;
  const int round = b / replicas[s];
  return round < rounds_ahead ? 0 : round - rounds_ahead;
}

TEST(AsynchronousTest, ReplicasAverageTheirGradients) {
  for (const std::vector<int>& replicas : sized<std::vector<int>>(
           {{2, 1}, {1, 2}, {3, 1}, {2, 1, 1}, {2, 2}, {4, 4}, {3, 2, 3}},
           {{1, 2}, {2, 1, 1}})) {
    for (const bool vertical : {false, true}) {
      SCOPED_TRACE(::testing::PrintToString(replicas) +
                   (vertical ? " vertical sync" : ""));
      const auto version = [&](int s, int b) {
        if (!vertical) return read_version(replicas, s, b);
        return replicas[0] * read_version(replicas, 0, b) /
               replicas[static_cast<std::size_t>(s)];
      };
      const auto ranks = expect_versions(
          schedules::pipedream(replicas, 12, vertical),
          {training_options(4, 12, "adamw")}, version, replicas);
      EXPECT_TRUE(ranks.replicas_agree);
    }
  }
}

// Short lists with a repeated steady state equal the lists of a long run.
TEST(AsynchronousTest, SteadyStatesRepeat) {
  const auto expect_same = [](Schedule few, const Schedule& all,
                              const AsynchronousTraining& training) {
    ASSERT_GT(few.period, 0);
    few.repeats = (all.num_micro_batches - few.num_micro_batches) / few.period;
    ASSERT_EQ(few.total_micro_batches(), all.num_micro_batches);
    for (int rank = 0; rank < all.num_ranks; ++rank) {
      const auto& list = all.actions[static_cast<std::size_t>(rank)];
      pipeline::ActionWalk walk(few, rank);
      for (std::size_t i = 0; i < list.size(); ++i) {
        ASSERT_FALSE(walk.is_at_end());
        EXPECT_EQ(to_string(walk.next()), to_string(list[i]));
      }
      EXPECT_TRUE(walk.is_at_end());
    }
    const auto a = run_asynchronously(few, training);
    const auto b = run_asynchronously(all, training);
    EXPECT_EQ(a.parameters, b.parameters);
    EXPECT_EQ(a.losses, b.losses);
    EXPECT_EQ(a.peak, b.peak);
    EXPECT_EQ(a.kept, b.kept);
  };
  const auto expect_repeats = [&](const std::vector<int>& replicas, int few,
                                  int all) {
    for (const bool vertical : {false, true}) {
      expect_same(schedules::pipedream(replicas, few, vertical),
                  schedules::pipedream(replicas, all, vertical),
                  {training_options(4, all, "adamw")});
    }
  };
  expect_repeats({1, 1, 1}, 8, 21);
  expect_repeats({2, 1}, 8, 20);
  expect_repeats({1, 3}, 9, 21);
  AsynchronousTraining doubled{training_options(8, 8, "adamw")};
  doubled.pieces = ceil_micro_batches(8, 4);
  expect_same(schedules::pipedream_2bw(3, 4, 3),
              schedules::pipedream_2bw(3, 4, 8), doubled);
}

TEST(AsynchronousTest, HeadsAreUntied) {
  const std::shared_ptr<const LayerList> tied =
      layers_of(ModelConfig{"gpt2", kVocab, 4, 8, 2, 2});
  const auto layers = pipeline::untied(tied);
  EXPECT_FALSE(shared_parameters(*tied).empty());
  EXPECT_TRUE(shared_parameters(*layers).empty());
  const auto head = layers->make(layers->size() - 1, {});
  const auto first = layers->make(0, {});
  std::map<std::string, Tensor> named;
  for (const NamedTensor& each : head->named_parameters()) {
    named[each.name] = each.tensor;
  }
  EXPECT_TRUE(bitwise_equal(named.at("lm_head.weight"),
                            first->named_parameters()[0].tensor));

  const int p = 3, steps = 6;
  expect_versions(schedules::pipedream(p, steps),
                  {training_options(4, steps, "adamw"), layers},
                  [](int s, int b) { return std::max(0, b - (p - 1 - s)); });
  // Layers without shared parameters are returned unchanged
  const auto pairs = std::make_shared<PairLayers>();
  EXPECT_EQ(pipeline::untied(pairs), pairs);
}

TEST(AsynchronousTest, StashKeepsWhatIsNeeded) {
  const Tensor w = Tensor::full({2}, 1);
  pipeline::WeightStash stash({w});
  stash.advance(0);
  w.fill(2);
  EXPECT_EQ(stash.newest(), 1);
  stash.load(0);
  EXPECT_EQ(w.to_vector<double>()[0], 1);
  stash.load(1);
  EXPECT_EQ(w.to_vector<double>()[0], 2);
  stash.advance(2);  // version 1 is not needed: it becomes version 2
  EXPECT_EQ(stash.newest(), 2);
  EXPECT_EQ(stash.size(), 1u);
  const std::string error = error_of([&] { stash.load(1); });
  EXPECT_THAT(error, ::testing::HasSubstr("version 1 is not kept"));
}

}  // namespace
}  // namespace shardbook::pipeline_test
