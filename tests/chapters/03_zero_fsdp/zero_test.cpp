// ZeRO against DDP: the same parameters and the same optimizer state, bit for
// bit, however they are sharded.

#include <gtest/gtest.h>

#include <cmath>

#include "tests/chapters/03_zero_fsdp/zero_support.h"
#include "tests/support/errors.h"
#include "tests/support/sanitized.h"

namespace shardbook::zero_test {
namespace {

struct Variant {
  const char* name;
  ZeroOptions options;
};

/// All ways to configure the stages; all compute the same.
std::vector<Variant> all_variants() {
  std::vector<Variant> all;
  for (const int n : {1, 2}) {
    // 50 is less than some gradients only; with 3 every weight travels alone
    const std::vector<Variant> more = {
        {"one bucket", {.stage = n}},
        {"small buckets",
         {.stage = n, .reduce_bucket_size = 50, .allgather_bucket_size = 13}},
        {"tiny buckets, no overlap",
         {.stage = n,
          .reduce_bucket_size = 3,
          .allgather_bucket_size = 13,
          .overlap_comm = false}},
        {"round robin",
         {.stage = n, .reduce_bucket_size = 50, .round_robin_gradients = true}},
        {"all-reduce",
         {.stage = n, .reduce_bucket_size = 50, .reduce_scatter = false}},
        {"sub-groups",
         {.stage = n, .reduce_bucket_size = 50, .sub_group_size = 5}},
        {"alignment 7", {.stage = n, .alignment = 7}}};
    all.insert(all.end(), more.begin(), more.end());
  }
  all.push_back({"offload",
                 {.stage = 2,
                  .reduce_bucket_size = 50,
                  .allgather_bucket_size = 13,
                  .offload_optimizer = true,
                  .sub_group_size = 7}});
  const std::vector<Variant> third = {
      {"prefetch", stage(3)},
      {"on demand",
       {.stage = 3,
        .overlap_comm = false,
        .persistence_threshold = 0,
        .prefetch_bucket_size = 0}},
      {"kept for backward",
       {.stage = 3,
        .persistence_threshold = 0,
        .max_reuse_distance = 1'000'000}},
      {"few kept for backward",
       {.stage = 3,
        .persistence_threshold = 0,
        .max_live_parameters = 60,
        .max_reuse_distance = 1'000'000}},
      // Biases stay gathered, weights do not
      {"persistent biases", {.stage = 3, .persistence_threshold = 7}},
      {"all persistent", {.stage = 3, .persistence_threshold = 1000}},
      {"one unit",
       {.stage = 3, .persistence_threshold = 0, .unit_types = {"Sequential"}}},
      {"optimizer on the host",
       {.stage = 3,
        .offload_optimizer = true,
        .sub_group_size = 11,
        .persistence_threshold = 7}},
      {"everything on the host",
       {.stage = 3,
        .offload_optimizer = true,
        .persistence_threshold = 7,
        .offload_parameters = true}}};
  all.insert(all.end(), third.begin(), third.end());
  return all;
}

class ZeroParity : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(WorldSizes, ZeroParity,
                         testing::ValuesIn(world_sizes()));

// [BIT]
TEST_P(ZeroParity, EveryStageEqualsDdpBitForBit) {
  const int d = GetParam();
  for (const DType dtype : {DType::kF32, DType::kF64, DType::kBF16}) {
    for (const Training& run : optimizers(dtype)) {
      const State ddp = train_ddp(d, run)[0];
      for (const Variant& variant : all_variants()) {
        for (const State& rank : train_zero(d, run, variant.options)) {
          EXPECT_EQ(first_difference(rank, ddp), "")
              << run.optimizer << " " << dtype_name(dtype) << ", stage "
              << variant.options.stage << ", " << variant.name;
        }
      }
    }
  }
}

// [BIT] Stage 1 adds micro-steps on each rank before it sums over ranks, as
// DDP's no_sync does. [RED] Stages 2 and 3 sum over ranks first.
TEST_P(ZeroParity, AccumulationEqualsNoSync) {
  const int d = GetParam();
  for (const Training& run : optimizers(DType::kF64, 3)) {
    const State ddp = train_ddp(d, run)[0];
    for (const Variant& variant : all_variants()) {
      const State rank = train_zero(d, run, variant.options)[0];
      if (variant.options.stage == 1) {
        EXPECT_EQ(first_difference(rank, ddp), "") << variant.name;
      } else {
        EXPECT_LT(largest_difference(rank, ddp), 1e-12)
            << "stage " << variant.options.stage << ", " << variant.name;
      }
    }
  }
}

// [RED] The norm is summed in another order.
TEST_P(ZeroParity, ClippingEqualsDdpUpToTheOrderOfTheNorm) {
  const int d = GetParam();
  Training run = optimizers(DType::kF64)[0];
  run.clip = 0.05;
  const State ddp = train_ddp(d, run)[0];
  Training unclipped = run;
  unclipped.clip = 0;
  EXPECT_GT(largest_difference(train_ddp(d, unclipped)[0], ddp), 1e-4);
  for (Variant variant : all_variants()) {
    variant.options.clip = run.clip;
    EXPECT_LT(largest_difference(train_zero(d, run, variant.options)[0], ddp),
              1e-12)
        << "stage " << variant.options.stage << ", " << variant.name;
  }
}

TEST(Zero, AnOverflowOnOneRankSkipsTheStepOnAll) {
  for (const int number : {1, 2, 3}) {
    const auto results = on_ranks(3, [&](ProcessGroup& world) {
      Sequential model = make_mlp(DType::kF16);
      ZeroOptions options = stage(number);
      options.loss_scale = 8;
      const auto zero = make_zero(model, world, options, "adam", {});
      const State before = state_of_zero(*zero);
      const Samples mine =
          every(make_samples(24, DType::kF16), world.rank(), 3);
      // Rank 1's gradient exceeds 65504
      const double scale = world.rank() == 1 ? 6e4 : 8;
      Samples large = mine;
      if (world.rank() == 1) {
        NoGrad no_grad;
        large.y = scale_of(mine.y, 1e4);
      }
      backward_of((*zero)(large.x), large, 1, scale);
      const double norm = zero->step();
      const bool is_same = first_difference(state_of_zero(*zero), before) == "";
      // The next step is counted again
      backward_of((*zero)(mine.x), mine, 1, 8);
      const double next = zero->step();
      return std::tuple(std::isfinite(norm), is_same, zero->num_skipped_steps(),
                        std::isfinite(next), zero->optimizer().slots()[0].step);
    });
    for (const auto& result : results) {
      EXPECT_EQ(result, std::tuple(false, true, 1, true, 1))
          << "stage " << number;
    }
  }
}

TEST(Zero, FrozenParametersStayAsTheyAre) {
  for (const int number : {1, 2, 3}) {
    const auto states = on_ranks(3, [&](ProcessGroup& world) {
      Sequential model = make_mlp(DType::kF64);
      auto parameters = model.parameters();
      parameters[1].set_requires_grad(false);
      parameters[2].set_requires_grad(false);
      const auto zero = make_zero(model, world, stage(number), "adam", {0.1});
      const State before = values_by_name(zero->full_parameters());
      Training run;
      run.dtype = DType::kF64;
      train_zero(*zero, run, 0, 2);
      const State after = values_by_name(zero->full_parameters());
      return std::tuple(after.at("0.weight") != before.at("0.weight"),
                        after.at("0.bias") == before.at("0.bias"),
                        after.at("2.weight") == before.at("2.weight"),
                        after.at("4.bias") != before.at("4.bias"),
                        after.size());
    });
    for (const auto& state : states) {
      EXPECT_EQ(state, std::tuple(true, true, true, true, 6u))
          << "stage " << number;
    }
  }
}

// It lies in no shard: nobody would average its gradient, or update it.
TEST(ZeroTrap, AParameterTrainedAfterConstructionIsRefused) {
  for (const int number : {1, 2, 3}) {
    const std::string error = error_on_ranks(2, [&](ProcessGroup& world) {
      Sequential model = make_mlp(DType::kF64);
      Tensor bias = model.parameters()[1];
      bias.set_requires_grad(false);
      const auto zero = make_zero(model, world, stage(number), "sgd", {0.1});
      const Samples mine = every(make_samples(8, DType::kF64), world.rank(), 2);
      model.parameters()[1].set_requires_grad();
      {
        NoGrad no_grad;
        EXPECT_NO_THROW((*zero)(mine.x));  // no backward follows
      }
      (*zero)(mine.x);
    });
    expect_text(error, {"'0.bias' was frozen at construction"});
  }
}

TEST(Zero, DtypesLieInShardsOfTheirOwn) {
  for (const int number : {1, 2, 3}) {
    Training run = optimizers(DType::kF64)[2];
    auto make = [](DType, std::uint64_t seed) {
      Sequential mixed;
      mixed.add(Linear("0", 5, 7, init_of(DType::kF64, seed)));
      mixed.add(CastTo(DType::kF32));
      mixed.add(Linear("2", 7, 3, init_of(DType::kF32, seed)));
      mixed.add(CastTo(DType::kF64));
      return mixed;
    };
    const State ddp = train_ddp(3, run, make)[0];
    for (const std::int64_t bucket : {500'000'000, 20}) {
      ZeroOptions options = stage(number);
      options.reduce_bucket_size = bucket;
      for (const State& rank : train_zero(3, run, options, make)) {
        EXPECT_EQ(first_difference(rank, ddp), "") << "stage " << number;
      }
    }
  }
}

TEST(Zero, BadOptionsAreRefusedBySentences) {
  auto error_for = [](const ZeroOptions& options,
                      const char* optimizer = "adam") {
    return error_on_ranks(1, [&](ProcessGroup& world) {
      Sequential model = make_mlp(DType::kF32);
      make_zero(model, world, options, optimizer, {});
    });
  };
  const std::pair<ZeroOptions, const char*> cases[] = {
      {{.stage = 4}, "stage 4; give 1, 2 or 3"},
      {{.stage = 1, .offload_optimizer = true},
       "offload_optimizer with stage 1"},
      {{.stage = 2, .offload_optimizer = true, .offload_parameters = true},
       "offload_parameters with stage 2"},
      {{.reduce_bucket_size = 0}, "buckets of 0"}};
  for (const auto& [options, words] : cases) {
    expect_text(error_for(options), {words});
  }
  expect_text(error_for(stage(2), "lamb"), {"'lamb' is unknown"});
  // A plain sum is needed to divide after it
  for (const int number : {1, 2, 3}) {
    expect_text(error_for({.stage = number, .divide_before = 2}),
                {"zero: divide_before 2 with stage " + std::to_string(number)});
  }
}

TEST(Zero, DifferentModelsAreRefusedOnEveryRank) {
  const std::string error = error_on_ranks(3, [](ProcessGroup& world) {
    const InitOptions init = init_of(DType::kF32);
    Sequential model;
    model.add(Linear("0", 5, world.rank() == 2 ? 8 : 7, init));
    make_zero(model, world, stage(2), "adam", {});
  });
  expect_text(error, {"'0.weight' f32[5, 7] on rank 0 and '0.weight' "
                      "f32[5, 8] on rank 2"});
}

TEST(Zero, AStepWithoutAGradientIsRefused) {
  for (const int number : {1, 2, 3}) {
    const std::string error = error_on_ranks(1, [&](ProcessGroup& world) {
      Sequential model = make_mlp(DType::kF32);
      const auto zero = make_zero(model, world, stage(number), "adam", {});
      zero->step();
    });
    expect_text(error, {"step without a"});
  }
}

TEST(Zero, ASecondBoundaryWithoutAStepIsRefused) {
  const std::string error = error_on_ranks(2, [](ProcessGroup& world) {
    Sequential model = make_mlp(DType::kF32);
    const auto zero = make_zero(model, world, stage(1), "adam", {});
    Training run;
    for (int i = 0; i < 2; ++i) {
      const Samples mine = samples_of(run, 0, 0, world);
      backward_of((*zero)(mine.x), mine, 1);
    }
  });
  expect_text(error, {"a second backward at the boundary"});
}

}  // namespace
}  // namespace shardbook::zero_test
