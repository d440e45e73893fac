// The strategy's idle time on large models of shapes, by the page's formulas.

#include <gtest/gtest.h>

#include <string>

#include "tests/chapters/06_1f1b/worlds_support.h"

namespace shardbook::pipeline_test {
namespace {

TEST(IdleTime, PlacesOfTheBubbleAreTheFormulas) {
  // The stages are large, so launches cost nothing next to products
  Options options = worlds_options(4);
  options.model = R"({"n_layer": 8, "n_embd": 2048, "n_head": 16,
                      "n_positions": 1024, "vocab_size": 64})";
  options.backend = "sim";
  options.batch = 16;
  options.seq = 1024;
  const auto idle = [&](const std::string& schedule) {
    return run_strategy(options, {.schedule = schedule,
                                  .micro_batches = 16,
                                  .partition = "type:block"})
        .report.time;
  };
  const auto one = idle("1f1b"), gpipe = idle("gpipe");
  const auto zero = idle("zb-h1");
  // (p-1)/(m+p-1) = 3/19 of the time; the optimizer counts as work too
  EXPECT_NEAR(one.idle_share, 3.0 / 19, 0.04);
  EXPECT_NEAR(gpipe.idle_share, one.idle_share, 0.02);
  EXPECT_LT(zero.idle_share, one.idle_share - 0.03);
  EXPECT_LT(zero.step_s, one.step_s);
}

// ZB-H2 has no bubble, unless ranks wait for each other before they step.
TEST(IdleTime, PostValidationTakesTheWaitAway) {
  Options options = worlds_options(3);
  options.model = R"({"model_type": "mlp", "n_embd": 4096,
                      "vocab_size": 18432, "n_positions": 1024})";
  options.backend = "sim";
  options.optimizer = "sgd";
  options.dtype = DType::kBF16;
  options.batch = 36;
  options.seq = 1024;
  options.steps = 3;
  StrategyOptions setup{
      .schedule = "zb-h2", .micro_batches = 12, .partition = "2,1,1"};
  const VirtualTime before = run_strategy(options, setup).report.time;
  setup.post_validation = true;
  const VirtualTime after = run_strategy(options, setup).report.time;
  EXPECT_LT(after.step_s, 0.97 * before.step_s);
  EXPECT_LT(after.idle_share, before.idle_share - 0.03);
}

}  // namespace
}  // namespace shardbook::pipeline_test
