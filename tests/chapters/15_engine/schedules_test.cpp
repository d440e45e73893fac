// WarmupLR and WarmupDecayLR against the published numbers.

#include <gtest/gtest.h>

#include <cmath>

#include "chapters/15_engine/engine.h"
#include "chapters/15_engine/lr_schedules.h"

namespace shardbook::engine {
namespace {

std::vector<double> rates(const WarmupOptions& options, int count) {
  const LrSchedule schedule = warmup_schedule(options);
  std::vector<double> all;
  for (int k = 0; k < count; ++k) all.push_back(schedule(k));
  return all;
}

TEST(WarmupLr, TheLogarithmOverAThousandSteps) {
  WarmupOptions options;  // 0 -> 1e-3 in 1000 steps
  const std::vector<double> found = rates(options, 5);
  EXPECT_EQ(found[0], 0);
  EXPECT_EQ(found[1], 0);
  EXPECT_NEAR(found[2], 1.0034e-4, 5e-9);
  EXPECT_NEAR(found[3], 1.5904e-4, 5e-9);
  EXPECT_NEAR(found[4], 2.0069e-4, 5e-9);
  EXPECT_EQ(warmup_lr(options, 1000), 1e-3);
  EXPECT_EQ(warmup_lr(options, 5000), 1e-3);
  EXPECT_LT(warmup_lr(options, 998), 1e-3);
}

TEST(WarmupLr, TheLineUpAndDown) {
  WarmupOptions options;
  options.max_lr = 1;
  options.num_steps = 4;
  options.is_log = false;
  options.total_steps = 8;
  EXPECT_EQ(rates(options, 10),
            (std::vector<double>{0, 0, .25, .5, .75, 1, .75, .5, .25, 0}));
  EXPECT_EQ(warmup_lr(options, 100), 0);
}

TEST(WarmupLr, BeginsAtTheMinimumAndTakesTwoStepsAtLeast) {
  WarmupOptions options;
  options.min_lr = 0.5;
  options.max_lr = 1;
  options.num_steps = 0;  // ln(1) would divide by zero
  const std::vector<double> found = rates(options, 4);
  EXPECT_EQ(found[0], 0.5);
  EXPECT_EQ(found[1], 0.5);
  EXPECT_EQ(found[2], 1);  // ln 2 / ln 2
  EXPECT_EQ(found[3], 1);
}

// A warm-up has at least two steps, so training ends before it does.
TEST(WarmupLr, AnEndBeforeTheWarmUpIsTheMinimum) {
  WarmupOptions options;
  options.max_lr = 1;
  options.num_steps = 1;
  options.total_steps = 1;
  EXPECT_EQ(warmup_lr(options, 2), 0);
  EXPECT_EQ(warmup_lr(options, 3), 0);
}

TEST(WarmupLr, TheConfigsKeysAreItsNumbers) {
  const auto rates_of = [](const std::string& scheduler, int count) {
    const auto config = DeepSpeedConfig::parse(
        R"({"optimizer": {"type": "SGD", "params": {"lr": 0.001}},
            "scheduler": )" +
            scheduler + "}",
        "ds.json");
    const LrSchedule rate = schedule_of(config, config.optimizer);
    std::vector<double> all;
    for (int k = 0; k < count; ++k) all.push_back(rate(k));
    return all;
  };
  EXPECT_EQ(rates_of(R"({"type": "WarmupDecayLR", "params": {"warmup_type":
                "linear", "warmup_num_steps": 4, "total_num_steps": 8,
                "warmup_max_lr": 1}})",
                     10),
            (std::vector<double>{0, 0, .25, .5, .75, 1, .75, .5, .25, 0}));
  // Without keys: logarithmic from 0 to the optimizer's rate in 1000 steps
  EXPECT_EQ(rates_of(R"({"type": "WarmupLR", "params": {}})", 5), rates({}, 5));
  EXPECT_EQ(rates_of(R"({"type": "WarmupLR", "params": {"warmup_min_lr":
                0.0005}})",
                     1)[0],
            0.0005);
}

}  // namespace
}  // namespace shardbook::engine
