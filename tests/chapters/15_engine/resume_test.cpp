// Training in f16 that stops after an overflow, and goes on from --checkpoint.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "chapters/15_engine/strategies.h"
#include "tests/chapters/15_engine/choice_support.h"
#include "tests/chapters/common/claims_support.h"
#include "tests/support/temp_folder.h"

namespace shardbook::engine {
namespace {

/// f16 that overflows at its first scale, and a rate that changes with each
/// step that is not skipped.
std::string fp16_config(const std::string& more) {
  return R"({"train_batch_size": 24, "gradient_accumulation_steps": 2,
             "fp16": {"enabled": true, "initial_scale_power": 24,
               "hysteresis": 1, "loss_scale_window": 8},
             "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
             "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.004,
               "warmup_num_steps": 8, "warmup_type": "linear"}})" +
         more + "}";
}

Report run(const std::string& text, int world, std::int64_t steps,
           const std::string& folder, bool resumes = false) {
  Options options = tiny_gpt("15_engine", world);
  options.dtype = DType::kF32;
  options.steps = steps;
  options.checkpoint = folder;
  options.resume = resumes;
  return train_config(options, text);
}

int skipped(const std::vector<double>& norms) {
  return static_cast<int>(std::count_if(
      norms.begin(), norms.end(), [](double x) { return !std::isfinite(x); }));
}

/// [BIT] The second half of a run that stopped after skipped steps.
void expect_the_same_end(const std::string& text, int world) {
  constexpr std::int64_t kSteps = 16, kStop = 10;
  const Report whole = run(text, world, kSteps, "");
  const TempFolder folder;
  const Report first = run(text, world, kStop, folder.path());
  ASSERT_GT(skipped(first.grad_norms), 0) << "nothing was skipped";
  ASSERT_LT(skipped(first.grad_norms), kStop - 2) << "nothing was learned";
  const Report rest = run(text, world, kSteps, folder.path(), true);
  ASSERT_EQ(rest.losses.size(), std::size_t{kSteps - kStop});
  const std::vector<double> end(whole.losses.begin() + kStop,
                                whole.losses.end());
  EXPECT_EQ(rest.losses, end);
  EXPECT_EQ(rest.grad_norms,
            std::vector<double>(whole.grad_norms.begin() + kStop,
                                whole.grad_norms.end()));
  expect_claims(rest);
}

TEST(EngineResume, EveryStageGoesOnBehindAnOverflow) {
  for (const std::string stage : {"0", "1", "2", "3"}) {
    SCOPED_TRACE("stage " + stage);
    expect_the_same_end(
        fp16_config(R"(, "zero_optimization": {"stage": )" + stage + "}"), 2);
  }
}

TEST(EngineResume, APipelineGoesOnBehindAnOverflow) {
  expect_the_same_end(fp16_config(R"(, "pipeline": {"stages": 2})"), 2);
}

// [TRAP] A run that forgets the number of skipped steps uses another rate.
TEST(EngineResume, TheRateFollowsTheStepsThatWereNotSkipped) {
  const std::string text = fp16_config(R"(, "pipeline": {"stages": 2})");
  const TempFolder folder;
  run(text, 2, 10, folder.path());
  const std::string manifest = folder / "step-00000010/manifest.json";
  nlohmann::json kept;
  std::ifstream(manifest) >> kept;
  EXPECT_GT(kept.at("progress").at("skipped_steps"), 0);
  const Report whole = run(text, 2, 12, "");
  kept["progress"]["skipped_steps"] = 0;
  std::ofstream(manifest) << kept;
  const Report forgets = run(text, 2, 12, folder.path(), true);
  EXPECT_EQ(forgets.losses[0], whole.losses[10]);
  EXPECT_NE(forgets.losses[1], whole.losses[11]);
}

}  // namespace
}  // namespace shardbook::engine
