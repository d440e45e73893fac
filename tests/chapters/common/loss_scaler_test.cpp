// The sequences of loss scales.

#include "chapters/common/run/loss_scaler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <tuple>
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

// What DeepSpeed 0.19.8 did with these overflows, from a scale of 2^8 on with a
// window of 4: DynamicLossScaler of ZeRO, and FP16_Optimizer without it.
TEST(LossScaler, FollowsDeepSpeed0198) {
  const auto deepspeed = [](ScalerKind kind, int hysteresis) {
    LossScaleOptions options;
    options.kind = kind;
    options.scale = 256;
    options.window = 4;
    options.hysteresis = hysteresis;
    return options;
  };
  const ScalerKind zero = ScalerKind::kDeepSpeed0171,
                   plain = ScalerKind::kDeepSpeedStage0;
  const std::vector<bool> overflows = {0, 0, 0, 0, 1, 0, 1,
                                       1, 0, 0, 0, 0, 0, 1};
  using Exponents = std::vector<int>;
  const Exponents halved = {8, 8, 8, 8, 7, 7, 6, 5, 5, 5, 5, 5, 6, 5};
  EXPECT_EQ(exponents(deepspeed(zero, 1), overflows), halved);
  EXPECT_EQ(exponents(deepspeed(zero, 2), overflows),
            (Exponents{8, 8, 8, 8, 8, 8, 7, 6, 6, 6, 6, 6, 7, 7}));
  EXPECT_EQ(exponents(deepspeed(plain, 1), overflows), halved);
  EXPECT_EQ(exponents(deepspeed(plain, 2), overflows), halved);
  for (const ScalerKind kind : {zero, plain}) {
    // The window and one step more, the first time
    EXPECT_EQ(exponents(deepspeed(kind, 2), std::vector<bool>(12, false)),
              (Exponents{8, 8, 8, 8, 9, 9, 9, 9, 10, 10, 10, 10}));
    LossScaleOptions shortest = deepspeed(kind, 1);
    shortest.window = 1;
    EXPECT_EQ(exponents(shortest, {0, 0, 0, 1, 0, 0, 0}),
              (Exponents{8, 9, 10, 9, 9, 10, 11}));
    LossScaleOptions consecutive = deepspeed(kind, 2);
    consecutive.consecutive_hysteresis = true;
    EXPECT_EQ(exponents(consecutive, {1, 0, 1, 0, 1, 1}),
              kind == zero ? (Exponents{8, 8, 8, 8, 8, 7})
                           : (Exponents{7, 7, 6, 6, 5, 4}));
    // A hysteresis of 0 is never used up
    EXPECT_EQ(exponents(deepspeed(kind, 0), {1, 1, 1}),
              kind == zero ? (Exponents{8, 8, 8}) : (Exponents{7, 6, 5}));
  }
}

TEST(LossScaler, TheSmallestScaleIsAnErrorOfDeepSpeedsZeroAlone) {
  for (const auto& [scale, min_scale, first] :
       {std::tuple{4.0, 2.0, 1}, {1.0, 4.0, 2}}) {
    LossScaleOptions options;
    options.scale = scale;
    options.min_scale = min_scale;
    options.hysteresis = 1;
    options.kind = ScalerKind::kDeepSpeedStage0;
    EXPECT_EQ(exponents(options, {1, 1, 1}),
              (std::vector<int>{first, first, first}));
    // A scale below the smallest one rises to it
    options.kind = ScalerKind::kDeepSpeed0171;
    EXPECT_EQ(exponents(options, {1}), (std::vector<int>{first}));
    EXPECT_THROW(exponents(options, {1, 1}), Error);
  }
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
