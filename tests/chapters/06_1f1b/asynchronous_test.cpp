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

AsynchronousOutcome run_asynchronously(
    const Schedule& schedule, const std::shared_ptr<const LayerList>& layers,
    const std::vector<int>& cuts, const Options& options,
    const std::vector<MicroBatch>& pieces, bool stashes = true) {
  const auto p = static_cast<std::size_t>(schedule.num_ranks);
  AsynchronousOutcome all;
  all.uses.resize(p);
  all.kept.resize(p);
  all.parameter_bytes.resize(p);
  all.peak.resize(p);
  std::vector<Values> values(p);
  std::vector<std::map<int, double>> losses(p);
  LaunchOptions launch;
  launch.deterministic = true;
  launch.timeout = std::chrono::seconds(60);
  run_ranks(
      schedule.num_ranks,
      [&](ProcessGroup& world) {
        const auto r = static_cast<std::size_t>(world.rank());
        RankContext::current().random = random_of(options);
        const Dataset data = small_data(options);
        pipeline::LanguageFeed feed(options, data, pieces);
        PipelineModel model(options, layers,
                            pipeline::layout_of(schedule, cuts), world);
        const auto optimizer = make_optimizer(
            options.optimizer, model.parameters(), options.optimizer_options);
        StashedUpdates updates(schedule, model, *optimizer, world.rank(),
                               stashes);
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
        all.peak[r] =
            static_cast<double>(RankContext::current().device.memory().peak(
                MemoryKind::kParameter));
      },
      launch);
  for (std::size_t r = 0; r < p; ++r) {
    all.losses.insert(losses[r].begin(), losses[r].end());
    for (const auto& [name, list] : values[r]) {
      const auto [found, is_new] = all.parameters.emplace(name, list);
      all.replicas_agree = all.replicas_agree && found->second == list;
    }
  }
  return all;
}

ReferenceRun run_sequentially(const LayerList& layers, const Options& options,
                              const SequentialRule& rule,
                              const std::vector<MicroBatch>& pieces) {
  RankContext context(Device::cpu(0), 0, 1);
  context.deterministic = true;
  const RankContext::Scope scope(context);
  return pipeline::train_sequentially(options, layers, rule, pieces,
                                      small_data(options));
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
  const auto layers = std::make_shared<PairLayers>();
  const auto cuts = cut_uniform(kLayers, p);
  const auto pieces = ceil_micro_batches(4, 1);
  for (const bool vertical : {false, true}) {
    SCOPED_TRACE(vertical ? "vertical sync" : "stashing");
    // The optimizer's state (momentum, Adam's moments) has no versions
    const Options options =
        training_options(4, steps, vertical ? "adamw" : "sgd");
    const Schedule schedule = schedules::pipedream(p, steps, vertical);
    const auto version = [&](int s, int b) {
      return std::max(0, b - (vertical ? p - 1 : p - 1 - s));
    };
    const auto ranks =
        run_asynchronously(schedule, layers, cuts, options, pieces);
    expect_bits(
        ranks,
        run_sequentially(*layers, options,
                         {cuts, version, std::vector<int>(p, 1)}, pieces),
        1);
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
  const auto layers = std::make_shared<PairLayers>();
  const auto cuts = cut_uniform(kLayers, p);
  const Options options = training_options(2 * m - 1, steps, "adamw");
  const auto pieces = ceil_micro_batches(options.batch, m);
  const Schedule schedule = schedules::pipedream_2bw(p, m, steps);
  const auto ranks =
      run_asynchronously(schedule, layers, cuts, options, pieces);
  const auto version = [&](int, int b) {
    return pipeline::double_buffered_version(b, m);
  };
  expect_bits(ranks,
              run_sequentially(*layers, options,
                               {cuts, version, std::vector<int>(p, 1)}, pieces),
              m);
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
  const auto layers = std::make_shared<PairLayers>();
  const auto cuts = cut_uniform(kLayers, p);
  const auto pieces = ceil_micro_batches(4, 1);
  const Options options = training_options(4, steps, "sgd");
  const Schedule schedule = schedules::pipedream(p, steps);
  const auto with = run_asynchronously(schedule, layers, cuts, options, pieces);
  const auto without =
      run_asynchronously(schedule, layers, cuts, options, pieces, false);
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
  const auto layers = std::make_shared<PairLayers>();
  const Options options = training_options(4, 5, "sgd");
  const auto pieces = ceil_micro_batches(4, 1);
  ReferenceRun plain;
  {
    RankContext context(Device::cpu(0), 0, 1);
    context.deterministic = true;
    const RankContext::Scope scope(context);
    context.random = random_of(options);
    InitOptions init;
    init.seed = options.seed;
    init.dtype = options.dtype;
    Stage model(*layers, 0, kLayers, init);
    const auto optimizer =
        make_optimizer("sgd", model.parameters(), options.optimizer_options);
    const Dataset data = small_data(options);
    for (int step = 0; step < 5; ++step) {
      context.random.step = static_cast<std::uint64_t>(step);
      context.random.batch = pieces[0].slice;
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
  expect_bits(run_asynchronously(schedules::pipedream(1, 5), layers,
                                 {0, kLayers}, options, pieces),
              plain, 1);
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
  const auto layers = std::make_shared<PairLayers>();
  const auto pieces = ceil_micro_batches(4, 1);
  for (const std::vector<int>& replicas : sized<std::vector<int>>(
           {{2, 1}, {1, 2}, {3, 1}, {2, 1, 1}, {2, 2}, {4, 4}, {3, 2, 3}},
           {{1, 2}, {2, 1, 1}})) {
    for (const bool vertical : {false, true}) {
      SCOPED_TRACE(::testing::PrintToString(replicas) +
                   (vertical ? " vertical sync" : ""));
      const int stages = static_cast<int>(replicas.size());
      const Options options = training_options(4, 12, "adamw");
      const auto cuts = cut_uniform(kLayers, stages);
      const Schedule schedule = schedules::pipedream(replicas, 12, vertical);
      const auto ranks =
          run_asynchronously(schedule, layers, cuts, options, pieces);
      EXPECT_TRUE(ranks.replicas_agree);
      const auto version = [&](int s, int b) {
        if (!vertical) return read_version(replicas, s, b);
        return replicas[0] * read_version(replicas, 0, b) /
               replicas[static_cast<std::size_t>(s)];
      };
      expect_bits(
          ranks,
          run_sequentially(*layers, options, {cuts, version, replicas}, pieces),
          1);
    }
  }
}

// Short lists with a repeated steady state equal the lists of a long run.
TEST(AsynchronousTest, SteadyStatesRepeat) {
  const auto layers = std::make_shared<PairLayers>();
  const auto expect_same = [&](Schedule few, const Schedule& all,
                               const Options& options,
                               const std::vector<MicroBatch>& pieces) {
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
    const auto cuts = cut_uniform(kLayers, all.num_stages);
    const auto a = run_asynchronously(few, layers, cuts, options, pieces);
    const auto b = run_asynchronously(all, layers, cuts, options, pieces);
    EXPECT_EQ(a.parameters, b.parameters);
    EXPECT_EQ(a.losses, b.losses);
    EXPECT_EQ(a.peak, b.peak);
    EXPECT_EQ(a.kept, b.kept);
  };
  const auto whole = ceil_micro_batches(4, 1);
  for (const bool vertical : {false, true}) {
    expect_same(schedules::pipedream(3, 8, vertical),
                schedules::pipedream(3, 21, vertical),
                training_options(4, 21, "adamw"), whole);
    expect_same(schedules::pipedream({2, 1}, 8, vertical),
                schedules::pipedream({2, 1}, 20, vertical),
                training_options(4, 20, "adamw"), whole);
    expect_same(schedules::pipedream({1, 3}, 9, vertical),
                schedules::pipedream({1, 3}, 21, vertical),
                training_options(4, 21, "adamw"), whole);
  }
  expect_same(schedules::pipedream_2bw(3, 4, 3),
              schedules::pipedream_2bw(3, 4, 8),
              training_options(8, 8, "adamw"), ceil_micro_batches(8, 4));
}

TEST(AsynchronousTest, HeadsAreUntied) {
  ModelConfig config;
  config.vocab_size = kVocab;
  config.n_positions = 4;
  config.n_embd = 8;
  config.n_layer = 2;
  config.n_head = 2;
  const std::shared_ptr<const LayerList> tied = layers_of(config);
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
  const Options options = training_options(4, steps, "adamw");
  const auto pieces = ceil_micro_batches(4, 1);
  const auto cuts = cut_uniform(layers->size(), p);
  const auto version = [](int s, int b) {
    return std::max(0, b - (p - 1 - s));
  };
  expect_bits(run_asynchronously(schedules::pipedream(p, steps), layers, cuts,
                                 options, pieces),
              run_sequentially(*layers, options,
                               {cuts, version, std::vector<int>(p, 1)}, pieces),
              1);
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
