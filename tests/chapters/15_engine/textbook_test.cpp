// An engine's step on the cluster `textbook` takes as long as its chapter's.

#include "tests/chapters/15_engine/choice_support.h"
#include "tests/chapters/common/textbook_support.h"

namespace shardbook::textbook::engine_step {
namespace {

constexpr std::int64_t kBatch = 48000;

Report report_of(const std::string& model, int ranks, std::int64_t micro_steps,
                 const std::string& keys) {
  Options options = mlp_options(ranks, kBatch);
  options.model = model;
  return engine::train_config(
      options, "{\"train_batch_size\": " + std::to_string(kBatch) +
                   ", \"gradient_accumulation_steps\": " +
                   std::to_string(micro_steps) + keys + "}");
}

std::string stage(int number, const std::string& more = "") {
  return R"(, "zero_optimization": {"stage": )" + std::to_string(number) +
         more + "}";
}

class TextbookEngine : public ::testing::TestWithParam<int> {};

// g forwards and backwards, one reduction at the boundary (stages 0 and 1) or
// one per micro-step (stage 2), and the end of the step. Dividing, scaling and
// clipping take no time here, and send only the norm.
TEST_P(TextbookEngine, AStepIsItsMicroStepsAndItsMessages) {
  const std::string wire = R"(, "communication_data_type": "bf16")";
  for (const std::int64_t g : {1, 3}) {
    for (const std::string& keys :
         {std::string(), std::string(R"(, "gradient_clipping": 0.1)"), wire,
          stage(1), stage(2), stage(3), stage(1) + wire,
          stage(2, R"(, "reduce_scatter": false)"),
          stage(1) + R"(, "bf16": {"enabled": true})"}) {
      SCOPED_TRACE(std::to_string(g) + " steps" + keys);
      expect_closed_form(report_of("mlp", GetParam(), g, keys));
      expect_closed_form(
          report_of("gpt-nano", GetParam(), g,
                    keys + R"(, "shardbook": {"recompute": "blocks"})"));
    }
  }
}

// As in chapter 00: for 8000 * 64 tokens of the mlp, fc1 and fc2 keep 5 h
// numbers, fc3 5 h and a statistic; the logits' gradient has 4 h; the loss and
// its gradient are added.
TEST(EnginePeak, IsThatOfOneMicroStep) {
  const Report report = report_of("mlp", 2, 3, stage(2));
  EXPECT_EQ(report.ranks[0]
                .peak[static_cast<std::size_t>(MemoryKind::kActivation)]
                .counted,
            4 * (8000.0 * 64 * (19 * 64 + 1) + 2));
}

INSTANTIATE_TEST_SUITE_P(Ranks, TextbookEngine, ::testing::Values(1, 2, 4, 8));

}  // namespace
}  // namespace shardbook::textbook::engine_step
