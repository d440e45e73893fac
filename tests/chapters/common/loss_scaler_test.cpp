// The sequences of loss scales.

#include "chapters/common/run/loss_scaler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "core/check.h"

namespace shardbook {
namespace {

/// log2 of the scale after each step.
std::vector<int> exponents(const LossScaleOptions& options,
                           const std::vector<bool>& overflows) {
  DynamicLossScaler scaler(options);
  std::vector<int> found;
  for (const bool overflow : overflows) {
    scaler.update(overflow);
    found.push_back(static_cast<int>(std::log2(scaler.scale())));
  }
  return found;
}

LossScaleOptions golden(ScalerKind kind) {
  LossScaleOptions options;
  options.scale = 32768;
  options.window = 4;
  options.kind = kind;
  return options;
}

const std::vector<bool> kOverflows = {0, 0, 0, 0, 1, 0, 1, 1, 0, 0, 0, 0, 1};

TEST(LossScaler, FollowsTheGoldenSequence) {
  const std::vector<int> expected = {15, 15, 15, 16, 16, 16, 15,
                                     14, 14, 14, 14, 15, 15};
  EXPECT_EQ(exponents(golden(ScalerKind::kDeepSpeed), kOverflows), expected);
  EXPECT_EQ(exponents(golden(ScalerKind::kMegatron), kOverflows), expected);
}

// One good step later; here the overflow at step 4 precedes the growth.
TEST(LossScaler, NewerDeepSpeedGrowsOneStepLater) {
  const std::vector<bool> good(10, false);
  EXPECT_EQ(exponents(golden(ScalerKind::kDeepSpeed), good),
            (std::vector<int>{15, 15, 15, 16, 16, 16, 16, 17, 17, 17}));
  EXPECT_EQ(exponents(golden(ScalerKind::kDeepSpeed0171), good),
            (std::vector<int>{15, 15, 15, 15, 16, 16, 16, 16, 17, 17}));
}

// Two formulations of the same rule agree.
TEST(LossScaler, MegatronAndDeepSpeedAgreeOnRandomOverflows) {
  std::mt19937 random(5);
  for (int run = 0; run < 200; ++run) {
    std::vector<bool> overflows(60);
    for (std::size_t i = 0; i < overflows.size(); ++i) {
      overflows[i] = random() % 8 == 0;
    }
    LossScaleOptions options = golden(ScalerKind::kDeepSpeed);
    options.scale = std::ldexp(1.0, 60);  // far from the floor
    options.window = 1 + static_cast<std::int64_t>(random() % 6);
    options.hysteresis = 1 + static_cast<int>(random() % 3);
    LossScaleOptions megatron = options;
    megatron.kind = ScalerKind::kMegatron;
    EXPECT_EQ(exponents(options, overflows), exponents(megatron, overflows));
  }
}

TEST(LossScaler, EveryGoodStepMayRestoreTheHysteresis) {
  LossScaleOptions options = golden(ScalerKind::kDeepSpeed);
  const std::vector<bool> overflows = {1, 0, 1, 0, 1};
  EXPECT_EQ(exponents(options, overflows),
            (std::vector<int>{15, 15, 14, 14, 13}));
  options.consecutive_hysteresis = true;
  EXPECT_EQ(exponents(options, overflows),
            (std::vector<int>{15, 15, 15, 15, 15}));
}

TEST(LossScaler, HasAFloorWhichOnlyDeepSpeedCallsAnError) {
  DynamicLossScaler scaler({.scale = 2, .hysteresis = 1});
  scaler.update(true);
  EXPECT_EQ(scaler.scale(), 1);
  EXPECT_THROW(scaler.update(true), Error);
  LossScaleOptions options;
  options.scale = 2;
  options.hysteresis = 1;
  options.kind = ScalerKind::kMegatron;
  EXPECT_EQ(exponents(options, {1, 1, 1}), (std::vector<int>{0, 0, 0}));
}

}  // namespace
}  // namespace shardbook
