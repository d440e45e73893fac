// Split backwards give the same bits as whole ones.

#include <gtest/gtest.h>

#include "chapters/common/models/models.h"
#include "chapters/common/pipeline/partition.h"
#include "tests/chapters/common/pipeline/pipeline_engine_support.h"
#include "tests/support/sanitized.h"

namespace shardbook::pipeline_test {
namespace {

using pipeline::Schedule;
namespace schedules = pipeline::schedules;

ModelConfig tiny_gpt() {
  ModelConfig config{"gpt2", kVocab, 4, 8, 6, 2};
  config.dropout = 0.1;
  return config;
}

class ZeroBubbleRanks : public ::testing::TestWithParam<int> {};

// Tied embeddings: with one rank, both uses share one store.
TEST_P(ZeroBubbleRanks, HasTheBitsOfOneFOneB) {
  const int p = GetParam();
  const std::vector<std::shared_ptr<const LayerList>> models = {
      std::make_shared<PairLayers>(), layers_of(tiny_gpt())};
  for (const auto& layers : models) {
    const int m = 2 * p - 1;
    const Options options = small_options(2 * m - (p > 2 ? 1 : 0));
    const auto pieces = ceil_micro_batches(options.batch, m);
    const auto cuts = cut_uniform(layers->size(), p);
    const Outcome one = together(
        on_ranks(schedules::one_f_one_b(p, m), layers, cuts, options, pieces));
    const schedules::ScheduleOptions search{
        .num_ranks = p, .micro_batches = m, .memory_limit = 1.0 * p};
    for (const Schedule& schedule :
         {schedules::zb_h1(p, m), schedules::zb_h2(p, m),
          schedules::make_schedule("zb-auto", search)}) {
      SCOPED_TRACE(schedule.name);
      const auto ranks = on_ranks(schedule, layers, cuts, options, pieces);
      const Outcome all = together(ranks);
      EXPECT_EQ(all.losses, one.losses);
      EXPECT_EQ(all.grads, one.grads);
      for (const Outcome& each : ranks) {
        EXPECT_EQ(each.predicted, each.counted);
      }
    }
  }
}

// ZB-H1: p sets on every rank; ZB-H2: 2p-1.
TEST_P(ZeroBubbleRanks, LiveSetsAreThoseOfTheFormula) {
  const int p = GetParam(), m = 3 * p;
  const auto layers = std::make_shared<PairLayers>();
  const auto cuts = cut_uniform(kLayers, p);
  const auto pieces = ceil_micro_batches(m, m);
  const auto h1 =
      on_ranks(schedules::zb_h1(p, m), layers, cuts, small_options(m), pieces);
  const auto h2 =
      on_ranks(schedules::zb_h2(p, m), layers, cuts, small_options(m), pieces);
  for (const Outcome& each : h1) EXPECT_EQ(each.live, p);
  for (const Outcome& each : h2) EXPECT_EQ(each.live, 2 * p - 1);
}

INSTANTIATE_TEST_SUITE_P(WorldSizes, ZeroBubbleRanks,
                         ::testing::ValuesIn(world_sizes()));

// A hook, a norm or a reduction before the last W would see incomplete
// gradients: W is still missing when backward returns.
TEST(ZeroBubbleTest, GradientsAreIncompleteBeforeTheLastW) {
  const int p = 2, m = 4;
  const auto layers = std::make_shared<PairLayers>();
  const Options options = small_options(m);
  const auto pieces = ceil_micro_batches(m, m);
  const Schedule schedule = schedules::zb_h1(p, m);
  std::vector<double> early(p), complete(p);
  std::vector<int> hooks_at_last_input(p), hooks(p);
  run_ranks(p, [&](ProcessGroup& world) {
    const auto r = static_cast<std::size_t>(world.rank());
    RankContext::current().random = random_of(options);
    const Dataset data = small_data(options);
    pipeline::LanguageFeed feed(options, data, pieces);
    PipelineModel model(options, layers,
                        one_stage_per_rank(cut_uniform(kLayers, p)), world);
    // Any weight whose gradient W computes
    Tensor weight;
    for (const NamedTensor& each : model.stage(world.rank()).named_parameters())
      if (each.tensor.ndim() == 2) weight = each.tensor;
    weight.add_accumulate_hook([&](Tensor&) { ++hooks[r]; });
    // Look at the gradient when the last input gradient is known
    Schedule whole = schedule;
    pipeline::Engine engine(whole, model, world, feed);
    const Tensor bias = model.parameters().back();
    int biases = 0;
    bias.add_accumulate_hook([&](Tensor&) {
      if (++biases < m) return;
      early[r] = grad_norm({weight});
      hooks_at_last_input[r] = hooks[r];
    });
    engine.run();
    complete[r] = grad_norm({weight});
  });
  for (std::size_t r = 0; r < p; ++r) {
    EXPECT_EQ(hooks[r], m);
    EXPECT_LT(hooks_at_last_input[r], m);
    EXPECT_GT(std::abs(complete[r] - early[r]), 1e-3 * complete[r]);
  }
}

}  // namespace
}  // namespace shardbook::pipeline_test
