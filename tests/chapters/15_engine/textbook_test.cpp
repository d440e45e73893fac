// The time of an engine's step on the cluster `textbook`: the page's closed form.

#include <cmath>

#include "tests/chapters/15_engine/choice_support.h"
#include "tests/chapters/common/textbook_support.h"

namespace shardbook::textbook::engine_step {
namespace {

using engine::DeepSpeedConfig;

constexpr std::int64_t kBatch = 48000;

double step_s(int ranks, std::int64_t micro_steps, const std::string& keys) {
  Options options = mlp_options(ranks, kBatch);
  const auto config = DeepSpeedConfig::parse(
      "{\"train_batch_size\": " + std::to_string(kBatch) +
          ", \"gradient_accumulation_steps\": " + std::to_string(micro_steps) +
          keys + "}",
      "ds.json");
  engine::apply_config(config, ranks, {}, options);
  return engine::train_choice(options, engine::choose(options, config))
      .time.step_s;
}

std::string stage(int number, const std::string& more = "") {
  return R"(, "zero_optimization": {"stage": )" + std::to_string(number) +
         more + "}";
}

class TextbookEngine : public ::testing::TestWithParam<int> {};

// g forwards and backwards, one reduction at the boundary (stages 0 and 1) or one
// per micro-step (stage 2), and what ends the step. Dividing, scaling and
// clipping take no time here, and send nothing but the norm.
TEST_P(TextbookEngine, AStepIsItsMicroStepsAndItsMessages) {
  const int n = GetParam();
  for (const std::int64_t g : {1, 3}) {
    const double tokens =
        static_cast<double>(kBatch * 64) / static_cast<double>(n * g);
    const auto steps = static_cast<double>(g);
    const double computes = 3 * kLayers * layer_forward_s(tokens) * steps;
    const double padded = 4 * std::ceil(kParameters / n) * n;
    const double scatter = reduce_scatter(n, padded);
    const double gather = all_gather(n, padded), norm = all_reduce(n, 8);
    SCOPED_TRACE(std::to_string(n) + " ranks, " + std::to_string(g) + " steps");
    expect_time(step_s(n, g, ""), computes + all_reduce(n, 4 * kParameters));
    expect_time(step_s(n, g, R"(, "gradient_clipping": 0.1)"),
                computes + all_reduce(n, 4 * kParameters));
    expect_time(step_s(n, g, R"(, "communication_data_type": "bf16")"),
                computes + all_reduce(n, 2 * kParameters));
    expect_time(step_s(n, g, stage(1)), computes + scatter + gather + norm);
    expect_time(step_s(n, g, stage(2)),
                computes + steps * scatter + gather + norm);
    expect_time(step_s(n, g, stage(2, R"(, "reduce_scatter": false)")),
                computes + steps * all_reduce(n, padded) + gather + norm);
    expect_time(
        step_s(n, g, stage(1) + R"(, "communication_data_type": "bf16")"),
        computes + reduce_scatter(n, padded / 2) + gather + norm);
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, TextbookEngine, ::testing::Values(1, 2, 4, 8));

}  // namespace
}  // namespace shardbook::textbook::engine_step
