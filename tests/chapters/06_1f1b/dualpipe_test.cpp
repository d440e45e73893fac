// Two directions through the ranks: each stage is on two ranks.

#include <gtest/gtest.h>

#include "chapters/common/pipeline/partition.h"
#include "tests/chapters/common/pipeline/pipeline_engine_support.h"
#include "tests/support/on_ranks.h"
#include "tests/support/sanitized.h"

namespace shardbook::pipeline_test {
namespace {

using pipeline::Schedule;
namespace schedules = pipeline::schedules;

class DualPipeRanks : public ::testing::TestWithParam<int> {};

TEST_P(DualPipeRanks, EqualsOneDevice) {
  const int p = GetParam(), n = 2 * p + 2;
  const auto layers = std::make_shared<PairLayers>();
  const Options options = small_options(2 * n - 1, DType::kF64);
  const auto pieces = ceil_micro_batches(options.batch, n);
  const Schedule schedule = schedules::dualpipe(p, n);
  const Outcome one = on_one_device(*layers, options, pieces, ascending(n));
  const auto ranks =
      on_ranks(schedule, layers, cut_uniform(kLayers, p), options, pieces);
  bool agree = false;
  const Outcome all = together(ranks, &agree);
  // Losses have the same bits; gradients are summed in another order, the same
  // on both ranks of a stage
  EXPECT_EQ(all.losses, one.losses);
  EXPECT_TRUE(agree);
  EXPECT_LT(largest_difference(all.grads, one.grads), 1e-12);
  for (const Outcome& each : ranks) {
    EXPECT_EQ(each.predicted, each.counted);
    EXPECT_EQ(each.live, p + 1);
  }
}

TEST_P(DualPipeRanks, WeightsOfBothCopiesStayEqual) {
  const int p = GetParam(), n = 2 * p;
  const auto layers = std::make_shared<PairLayers>();
  Options options = small_options(n);
  options.clip = 0.5;
  const auto pieces = ceil_micro_batches(options.batch, n);
  const Schedule schedule = schedules::dualpipe(p, n);
  const auto ranks = shardbook::on_ranks(p, [&](ProcessGroup& world) {
    RankContext::current().random = random_of(options);
    const Dataset data = small_data(options);
    pipeline::LanguageFeed feed(options, data, pieces);
    PipelineModel model(options, layers,
                        pipeline::layout_of(schedule, cut_uniform(kLayers, p)),
                        world);
    const auto optimizer = make_optimizer("adamw", model.parameters(), {});
    pipeline::Engine engine(schedule, model, world, feed);
    std::pair<Values, double> weights_and_norm;
    for (int step = 0; step < 3; ++step) {
      feed.set_first_step(step);
      const double loss = engine.run();
      model.reduce_shared_gradients();
      weights_and_norm.second =
          model.update(options, *optimizer, loss).grad_norm;
    }
    for (int s = 0; s < p; ++s) {
      if (!model.holds(s)) continue;
      for (const NamedTensor& each : model.stage(s).named_parameters()) {
        weights_and_norm.first[each.name] = each.tensor.to_vector<double>();
      }
    }
    return weights_and_norm;
  });
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    EXPECT_EQ(ranks[r].first, ranks[ranks.size() - 1 - r].first);
    EXPECT_EQ(ranks[r].second, ranks[0].second);
  }
}

INSTANTIATE_TEST_SUITE_P(WorldSizes, DualPipeRanks,
                         ::testing::ValuesIn(sized<int>({2, 4, 8}, {4})));

}  // namespace
}  // namespace shardbook::pipeline_test
