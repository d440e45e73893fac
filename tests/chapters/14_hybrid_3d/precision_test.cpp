// 16 bits: scaled losses, skipped steps, sums in f32.

#include <set>

#include "tests/chapters/14_hybrid_3d/hybrid_support.h"
#include "tests/support/sanitized.h"

namespace shardbook::hybrid {
namespace {

Options half_options(const HybridOptions& setup, DType dtype) {
  Options options = nano_options(ranks_of(setup));
  options.dtype = dtype;
  options.steps = 6;
  return options;
}

HybridOptions cube(int zero) {
  return {.dp = 2,
          .tp = 2,
          .pp = zero < 2 ? 2 : 1,
          .zero_stage = zero,
          .sequence_parallel = true,
          .micro_batches = 2};
}

TEST(HybridPrecision, TrainsInSixteenBits) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const int zero : {0, 1, 2, 3}) {
      SCOPED_TRACE(std::string(dtype_name(dtype)) + " zero " +
                   std::to_string(zero));
      const HybridOptions setup = cube(zero);
      expect_claims(train_on(half_options(setup, dtype), setup));
    }
  }
}

HybridOptions experts_of(int zero) {
  return {.dp = 2,
          .pp = zero < 2 ? 2 : 1,
          .zero_stage = zero,
          .micro_batches = 2,
          .experts = 4,
          .ep = 2,
          .aux_coefficient = 0.3};
}

// The gates' losses are scaled like the main loss, on all meshes.
TEST(HybridPrecision, TrainsExpertsInSixteenBits) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const int zero : {0, 1, 2}) {
      SCOPED_TRACE(std::string(dtype_name(dtype)) + " zero " +
                   std::to_string(zero));
      const HybridOptions setup = experts_of(zero);
      expect_claims(train_on(half_options(setup, dtype), setup));
    }
  }
}

// The loss scale is a power of two: it changes no loss, including the gates'.
// Unscaled, the gates' would all but vanish.
TEST(HybridPrecision, TheScaleReachesTheLossesOfGates) {
  for (const int zero : {0, 2}) {
    const auto losses = [&](double scale, double aux_coefficient, bool one) {
      HybridOptions setup = experts_of(zero);
      setup.loss_scale.scale = scale;
      setup.aux_coefficient = aux_coefficient;
      Options options = half_options(setup, DType::kF16);
      options.batch = 8, options.steps = 3;
      options.clip = 0;
      options.optimizer = "sgd";
      options.optimizer_options.lr = 1;
      if (one) return reference_run(options, setup).losses.back();
      return train_on(options, setup).losses.back();
    };
    for (const bool one : {false, true}) {
      const double small = losses(1 << 4, 1, one);
      const double with = losses(1 << 10, 1, one);
      const double without = losses(1 << 10, 0, one);
      EXPECT_LT(std::abs(with - small), std::abs(with - without) / 4)
          << small << " " << with << " " << without;
    }
  }
}

// Before the division, the gradients of eight replicas under ZeRO-2 and -3 are
// eight times their shares of the mean, so they overflow earlier. One device
// skips the same steps, by the same sequence of factors.
TEST(HybridPrecision, OneDeviceLeavesOutTheStepsThatRanksDo) {
  for (const int zero : {0, 1, 2, 3}) {
    std::set<std::string> patterns;
    for (const char* scaler : {"deepspeed", "deepspeed-0.17.1"}) {
      HybridOptions setup;
      setup.dp = 8, setup.micro_batches = 1;
      setup.zero_stage = zero;
      setup.scaler = scaler;
      setup.loss_scale = {.scale = 1 << 19, .window = 1, .hysteresis = 1};
      SCOPED_TRACE(name_of(setup) + " " + scaler);
      Options options = half_options(setup, DType::kF16);
      options.batch = 8, options.steps = 10;
      const std::vector<double> norms = train_on(options, setup).grad_norms;
      const std::vector<double> alone =
          reference_run(options, setup).grad_norms;
      std::string pattern;
      for (std::size_t i = 0; i < norms.size(); ++i) {
        EXPECT_EQ(std::isfinite(norms[i]), std::isfinite(alone.at(i)));
        pattern += std::isfinite(norms[i]) ? '.' : 'x';
      }
      expect_text(pattern, {".x"});
      patterns.insert(pattern);
    }
    EXPECT_EQ(patterns.size(), 2u) << *patterns.begin();
  }
}

/// Scales and skipped steps on each rank.
struct Found {
  double scale = 0;
  std::int64_t skipped = 0;
  std::vector<double> losses;
  bool operator==(const Found& other) const {
    return scale == other.scale && skipped == other.skipped &&
           losses == other.losses;
  }
};

std::vector<Found> run(const HybridOptions& setup) {
  const Options options = half_options(setup, DType::kF16);
  const auto read = [&](ProcessGroup&, DeviceMesh&, MeshStrategy& strategy) {
    Found found;
    for (std::int64_t k = 0; k < options.steps; ++k) {
      found.losses.push_back(strategy.step(k).loss);
    }
    found.scale = strategy.scaler().scale();
    found.skipped = strategy.num_skipped_steps();
    return found;
  };
  return on_mesh<MeshStrategy>(options, setup, read);
}

// Gradients overflow somewhere: all ranks skip the step, weights stay, and the
// scale falls until they do not.
TEST(HybridPrecision, AnOverflowSkipsTheStepOnAllRanks) {
  for (HybridOptions setup :
       {cube(0), cube(1), cube(2), cube(3), experts_of(1), experts_of(2)}) {
    SCOPED_TRACE(name_of(setup));
    setup.loss_scale.scale = 1 << 19;
    setup.loss_scale.hysteresis = 1;
    const std::vector<Found> all = run(setup);
    EXPECT_GT(all[0].skipped, 0);
    EXPECT_LT(all[0].skipped, 6);
    EXPECT_EQ(all[0].scale,
              std::ldexp(1.0, 19 - static_cast<int>(all[0].skipped)));
    for (const Found& found : all) EXPECT_TRUE(found == all[0]);
    // The bill accounts for skipped steps
    expect_claims(train_on(half_options(setup, DType::kF16), setup));
  }
}

/// The first step overflows on rank `sick` alone, in the gradient of `part`,
/// whose elements no other rank of its tp group has; then the step is repeated
/// twice.
std::vector<Found> run_with_one_sick(const HybridOptions& setup, int sick,
                                     const std::string& part, DType dtype) {
  const Options options = half_options(setup, dtype);
  const auto read = [&](ProcessGroup& world, DeviceMesh&,
                        HybridStrategy& strategy) {
    bool is_sick = world.rank() == sick;
    for (const UpdateBucket& bucket : strategy.update().buckets()) {
      for (const NamedTensor& each : bucket.parameters) {
        if (each.name.find(part) == std::string::npos) continue;
        each.tensor.add_accumulate_hook([&is_sick](Tensor& parameter) {
          if (is_sick) parameter.grad().fill(HUGE_VAL);
        });
      }
    }
    Found found;
    for (int i = 0; i < 3; ++i) {
      found.losses.push_back(strategy.step(0).loss);
      is_sick = false;
    }
    found.scale = strategy.scaler().scale();
    found.skipped = strategy.num_skipped_steps();
    return found;
  };
  return on_mesh(options, setup, read);
}

// If each rank judged its own gradients, the others would continue alone.
TEST(HybridPrecision, AnOverflowOnOneRankSkipsTheStepOnAll) {
  struct Case {
    HybridOptions setup;
    const char* part;
  };
  for (Case each : {Case{cube(0), "attn.c_attn.weight"},
                    Case{cube(1), "attn.c_attn.weight"},
                    Case{experts_of(0), "experts.c_fc.weight"},
                    Case{experts_of(1), "experts.c_fc.weight"}}) {
    each.setup.loss_scale.scale = 1 << 4;
    each.setup.loss_scale.hysteresis = 1;
    for (int sick = 0; sick < ranks_of(each.setup); sick += 3) {
      // Without a loss scale, a step with an infinite gradient is skipped, too
      const DType dtype = sick == 0   ? DType::kF16
                          : sick == 3 ? DType::kF32
                                      : DType::kBF16;
      SCOPED_TRACE(name_of(each.setup) + " rank " + std::to_string(sick) + " " +
                   std::string(dtype_name(dtype)));
      const std::vector<Found> all =
          run_with_one_sick(each.setup, sick, each.part, dtype);
      EXPECT_EQ(all[0].skipped, 1);
      EXPECT_EQ(all[0].scale, dtype == DType::kF16 ? 8 : 1);
      EXPECT_EQ(all[0].losses[1], all[0].losses[0]);  // no weight has changed
      EXPECT_NE(all[0].losses[2], all[0].losses[1]);
      for (const Found& found : all) EXPECT_TRUE(found == all[0]);
    }
  }
}

// A rate that ruins the weights: the next step must not change them.
TEST(HybridPrecision, StepsWithoutAFiniteNormAreLeftOutInEveryDtype) {
  for (const int zero : {0, 1, 2, 3}) {
    for (const DType dtype : {DType::kF32, DType::kF64}) {
      const HybridOptions setup = cube(zero);
      Options options = half_options(setup, dtype);
      options.optimizer = "sgd";
      options.clip = 0;
      const auto read = [&](ProcessGroup&, DeviceMesh&,
                            MeshStrategy& strategy) {
        std::vector<StepResult> steps;
        strategy.optimizer().set_lr(dtype == DType::kF64 ? 1e300 : 1e36);
        for (std::int64_t k = 0; k < 3; ++k) steps.push_back(strategy.step(k));
        return std::pair(steps, strategy.num_skipped_steps());
      };
      const auto runs = on_mesh<MeshStrategy>(options, setup, read);
      SCOPED_TRACE(name_of(setup) + " " + std::string(dtype_name(dtype)));
      for (const auto& [steps, skipped] : runs) {
        EXPECT_FALSE(steps[0].was_skipped);
        EXPECT_TRUE(steps[1].was_skipped && steps[2].was_skipped);
        EXPECT_FALSE(std::isfinite(steps[1].grad_norm));
        EXPECT_EQ(skipped, 2);
      }
    }
  }
}

// A norm 1024 times too large would clip gradients to almost nothing. By SGD,
// which shows the scale of gradients.
TEST(HybridPrecision, TheNormThatClipsIsThatOfUnscaledGradients) {
  for (const int zero : {0, 1, 2, 3}) {
    HybridOptions setup = cube(zero);
    setup.loss_scale.scale = 1 << 10;
    SCOPED_TRACE(name_of(setup));
    Options options = half_options(setup, DType::kF16);
    options.steps = 2;
    options.optimizer = "sgd";
    options.optimizer_options.lr = 0.5;
    options.check = false;
    const Report report = train_on(options, setup);
    options.dtype = DType::kF64;
    const ReferenceRun exact = reference_run(options, setup);
    EXPECT_GT(exact.grad_norms[0], options.clip);
    EXPECT_NEAR(report.grad_norms[0], exact.grad_norms[0],
                0.02 * exact.grad_norms[0]);
    options.optimizer_options.lr = 0;
    const double still = reference_run(options, setup).losses[1];
    const double moved = std::abs(still - exact.losses[1]);
    EXPECT_GT(moved, 0.05);
    EXPECT_NEAR(report.losses[1], exact.losses[1], 0.2 * moved);
  }
}

TEST(HybridPrecision, OnlyF16IsScaledByTheScalerThatIsNamed) {
  HybridOptions setup;
  for (const DType dtype : {DType::kBF16, DType::kF32, DType::kF64}) {
    EXPECT_EQ(setup.loss_scaler(dtype).scale(), 1);
  }
  EXPECT_EQ(setup.loss_scaler(DType::kF16).scale(), 65536);
  setup.loss_scale.scale = 2;
  setup.loss_scale.window = setup.loss_scale.hysteresis = 1;
  // At the smallest scale, DeepSpeed gives up
  DynamicLossScaler deepspeed = setup.loss_scaler(DType::kF16);
  deepspeed.update(true);
  EXPECT_THROW(deepspeed.update(true), Error);
  setup.scaler = "megatron";
  DynamicLossScaler megatron = setup.loss_scaler(DType::kF16);
  for (int i = 0; i < 3; ++i) megatron.update(true);
  EXPECT_EQ(megatron.scale(), 1);
  // Newer versions grow one good step later
  setup.scaler = "deepspeed-0.17.1";
  DynamicLossScaler newer = setup.loss_scaler(DType::kF16);
  newer.update(false);
  EXPECT_EQ(newer.scale(), 2);
  newer.update(false);
  EXPECT_EQ(newer.scale(), 4);
}

// Adding a small gradient to a large sum in bf16 loses it; in f32 it does not.
TEST(HybridPrecision, SumsInF32KeepWhatBf16Loses) {
  HybridOptions setup = cube(0);
  setup.dp = setup.tp = 1, setup.sequence_parallel = false;
  setup.micro_batches = 24;
  Options options = half_options(setup, DType::kF32);
  options.optimizer = "sgd";
  options.optimizer_options.lr = 1e6;  // weights end as multiples of gradients
  const auto gradients = [&](DType dtype, bool accumulate_f32) {
    options.dtype = dtype;
    setup.accumulate_f32 = accumulate_f32;
    return on_mesh(options, setup,
                   [](ProcessGroup&, DeviceMesh&, HybridStrategy& strategy) {
                     strategy.step(0);
                     return values_of(strategy);
                   });
  };
  const auto exact = gradients(DType::kF32, false);
  const auto error = [&](bool accumulate_f32) {
    const auto found = gradients(DType::kBF16, accumulate_f32);
    double squares = 0, all = 0;
    for (std::size_t rank = 0; rank < exact.size(); ++rank) {
      for (const auto& [name, values] : exact[rank]) {
        for (std::size_t i = 0; i < values.size(); ++i) {
          const double gap = found[rank].at(name)[i] - values[i];
          squares += gap * gap, all += values[i] * values[i];
        }
      }
    }
    return std::sqrt(squares / all);
  };
  const double in_f32 = error(true), in_bf16 = error(false);
  EXPECT_LT(in_f32, 0.7 * in_bf16);
}

TEST(HybridPrecision, SumsInF32HoldEveryClaim) {
  for (const int zero : {0, 1}) {
    for (const char* schedule : {"1f1b", "zb-h1"}) {
      HybridOptions setup = cube(zero);
      setup.accumulate_f32 = true;
      setup.schedule = schedule;
      expect_claims(train_on(half_options(setup, DType::kBF16), setup));
    }
  }
}

}  // namespace
}  // namespace shardbook::hybrid
