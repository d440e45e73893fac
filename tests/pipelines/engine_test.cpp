// Ranks that execute a schedule compute what one device does with the same
// micro-batches in the same order.

#include "chapters/06_1f1b/engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "chapters/common/models.h"
#include "core/check.h"
#include "tests/pipelines/engine_support.h"

namespace shardbook::pipeline_test {
namespace {

using pipeline::Schedule;
namespace schedules = pipeline::schedules;

std::shared_ptr<const LayerList> pair_layers() {
  return std::make_shared<PairLayers>();
}

/// Bit for bit: losses of micro-batches, and gradients.
void expect_one_device(const Schedule& schedule, const Options& options,
                       const std::vector<int>& order) {
  SCOPED_TRACE(schedule.name + ", " + std::to_string(schedule.num_ranks) +
               " ranks, " + std::to_string(schedule.num_micro_batches) +
               " micro-batches");
  const auto layers = pair_layers();
  const auto pieces =
      ceil_micro_batches(options.batch, schedule.num_micro_batches);
  const Outcome one = on_one_device(*layers, options, pieces, order);
  const auto ranks =
      on_ranks(schedule, layers, cut_uniform(kLayers, schedule.num_stages),
               options, pieces);
  const Outcome all = together(ranks);
  EXPECT_EQ(all.losses, one.losses);
  EXPECT_EQ(all.grads, one.grads);
  for (const Outcome& each : ranks) EXPECT_EQ(each.predicted, each.counted);
}

class EngineRanks : public ::testing::TestWithParam<int> {};

TEST_P(EngineRanks, OneFOneBEqualsAccumulationOnOneDevice) {
  const int p = GetParam();
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    // Fewer micro-batches than stages, and a last one that is short
    for (const int m : {1, 2, 5, 8}) {
      const Options options = small_options(m == 5 ? 13 : 2 * m, dtype);
      expect_one_device(schedules::one_f_one_b(p, m), options, ascending(m));
    }
  }
}

TEST_P(EngineRanks, GpipeSumsInReverse) {
  const int p = GetParam(), m = 4;
  std::vector<int> order = ascending(m);
  std::reverse(order.begin(), order.end());
  expect_one_device(schedules::gpipe(p, m), small_options(8), order);
  expect_one_device(schedules::naive(p, m), small_options(8), ascending(m));
}

TEST_P(EngineRanks, LiveSetsAreThoseOfTheFormula) {
  const int p = GetParam(), m = 5;
  const Options options = small_options(10);
  const auto pieces = ceil_micro_batches(10, m);
  const auto cuts = cut_uniform(kLayers, p);
  const auto one = on_ranks(schedules::one_f_one_b(p, m), pair_layers(), cuts,
                            options, pieces);
  const auto gpipe =
      on_ranks(schedules::gpipe(p, m), pair_layers(), cuts, options, pieces);
  for (int s = 0; s < p; ++s) {
    const auto at = static_cast<std::size_t>(s);
    EXPECT_EQ(one[at].live, std::min(p - s, m));
    EXPECT_EQ(gpipe[at].live, m);
  }
}

INSTANTIATE_TEST_SUITE_P(WorldSizes, EngineRanks,
                         ::testing::Values(1, 2, 3, 4, 8));

TEST(EngineTest, InterleavedSchedulesEqualOneDevice) {
  for (const int p : {2, 3, 4}) {
    const int m = 2 * p;
    expect_one_device(schedules::interleaved(p, m, 2),
                      small_options(m + 1 == 5 ? 7 : 2 * m), ascending(m));
  }
  // Groups of 3 over 2 ranks: 3 + 2 micro-batches
  expect_one_device(schedules::interleaved_grouped(2, 5, 3, 3),
                    small_options(10), ascending(5));
  const auto ranks = on_ranks(schedules::interleaved(4, 8, 2), pair_layers(),
                              cut_uniform(kLayers, 8), small_options(8),
                              ceil_micro_batches(8, 8));
  const std::vector<int> live = {11, 9, 7, 5};
  for (std::size_t r = 0; r < 4; ++r) EXPECT_EQ(ranks[r].live, live[r]);
}

// The wrong variant of "who has the embedding": by rank instead of by virtual
// stage, four of eight chunks would be asked for tokens.
TEST(EngineTest, FirstAndLastAreVirtualStages) {
  const Schedule schedule = schedules::interleaved(4, 4, 2);
  EXPECT_EQ(schedule.stage_at(0, 0), 0);
  EXPECT_EQ(schedule.stage_at(0, 1), 4);
  EXPECT_EQ(schedule.stage_at(3, 1), 7);
}

TEST(EngineTest, TiedEmbeddingsAreSummedOverTheirRanks) {
  const ModelConfig config = [] {
    ModelConfig c;
    c.vocab_size = kVocab;
    c.n_positions = 4;
    c.n_embd = 8;
    c.n_layer = 2;
    c.n_head = 2;
    return c;
  }();
  const std::shared_ptr<const LayerList> layers = layers_of(config);
  const Options options = small_options(6, DType::kF64);
  const auto pieces = ceil_micro_batches(6, 3);
  const Outcome one = on_one_device(*layers, options, pieces, ascending(3));
  for (const int p : {1, 2, 4}) {
    bool agree = false;
    const Outcome all = together(on_ranks(schedules::one_f_one_b(p, 3), layers,
                                          cut_uniform(4, p), options, pieces),
                                 &agree);
    EXPECT_TRUE(agree);
    EXPECT_LT(largest_difference(all.grads, one.grads), 1e-12);
  }
}

TEST(EngineTest, RefusesWhatDoesNotFit) {
  const Options options = small_options(4);
  const auto pieces = ceil_micro_batches(4, 2);
  const auto error = [&](const std::function<void(ProcessGroup&, PipelineModel&,
                                                  pipeline::Feed&)>& body) {
    try {
      run_ranks(2, [&](ProcessGroup& world) {
        const Dataset data = small_data(options);
        pipeline::LanguageFeed feed(options, data, pieces);
        PipelineModel model(options, pair_layers(),
                            one_stage_per_rank(cut_uniform(kLayers, 2)), world);
        body(world, model, feed);
      });
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_THAT(error([](auto& world, auto& model, auto& feed) {
                pipeline::Engine(schedules::one_f_one_b(3, 2), model, world,
                                 feed);
              }),
              ::testing::HasSubstr("made for 3 ranks; there are 2"));
  EXPECT_THAT(error([](auto& world, auto& model, auto& feed) {
                pipeline::Engine(schedules::interleaved(2, 2, 2), model, world,
                                 feed);
              }),
              ::testing::HasSubstr("has 4 stages; the model is cut into 2"));
  EXPECT_THAT(error([](auto& world, auto& model, auto& feed) {
                pipeline::Engine(schedules::pipedream(2, 2), model, world,
                                 feed);
              }),
              ::testing::HasSubstr("updates come in between"));
}

}  // namespace
}  // namespace shardbook::pipeline_test
