// The program's trainer: parity, bytes and memory held, for every way to shard.

#include <gtest/gtest.h>

#include "chapters/03_zero_fsdp/trainer.h"
#include "tests/chapters/03_zero_fsdp/fsdp_support.h"
#include "tests/chapters/common/sharded_support.h"
#include "tests/support/sanitized.h"

namespace shardbook::fsdp_test {
namespace {

using zero_fsdp::Trainer;
using zero_fsdp::TrainerOptions;

/// The text of its config.
std::string tiny_gpt() {
  return R"({"model_type": "gpt2", "vocab_size": 256,)"
         R"("n_positions": 16, "n_embd": 16, "n_layer": 3,)"
         R"("n_head": 2})";
}

Options tiny_options(const std::string& model) {
  Options options;
  options.model = model;
  options.data = "random";
  options.cluster = "none";
  options.batch = 24;
  options.seq = 8;
  options.steps = 2;
  options.deterministic = true;
  return options;
}

Report train_language(int d, Options options, const TrainerOptions& how) {
  options.world_size = d;
  return sharded_test::report_of<Trainer>(options, how);
}

struct TrainerVariant {
  std::string name;
  TrainerOptions how;
};

std::vector<TrainerVariant> variants(int d) {
  std::vector<TrainerVariant> all;
  for (const char* strategy : {"zero1", "zero2", "zero3", "fsdp", "fsdp2"}) {
    TrainerOptions how;
    how.strategy = strategy;
    all.push_back({strategy, how});
    how.recompute = true;
    all.push_back({std::string(strategy) + " recompute", how});
    how.recompute = false;
    how.micro_batches = d == 3 ? 4 : 3;
    all.push_back({std::string(strategy) + " accumulate", how});
    if (how.strategy[0] == 'z') continue;
    how.no_sync = true;
    all.push_back({std::string(strategy) + " no_sync", how});
    how.micro_batches = 1;
    how.no_sync = false;
    for (const char* sharding : {"shard_grad_op", "no_shard"}) {
      TrainerOptions other = how;
      other.sharding_strategy = sharding;
      all.push_back({std::string(strategy) + " " + sharding, other});
      other.micro_batches = d == 3 ? 4 : 3;
      all.push_back({std::string(strategy) + " accumulate " + sharding, other});
    }
    TrainerOptions ahead = how;
    ahead.fsdp.forward_prefetch = true;
    ahead.backward_prefetch = "post";
    all.push_back({std::string(strategy) + " forward prefetch, post", ahead});
    TrainerOptions late = how;
    late.backward_prefetch = "none";
    late.cpu_offload = true;
    all.push_back({std::string(strategy) + " no prefetch, offload", late});
    TrainerOptions one = how;
    one.wrap = "none";
    all.push_back({std::string(strategy) + " one unit", one});
    TrainerOptions size = how;
    size.wrap = "size";
    size.min_num_params = 3000;
    all.push_back({std::string(strategy) + " by size", size});
    if (d % 2 == 0) {
      TrainerOptions hybrid = how;
      hybrid.sharding_strategy = "hybrid_shard";
      hybrid.fsdp.shard_size = d / 2;
      all.push_back({std::string(strategy) + " hybrid", hybrid});
    }
  }
  return all;
}

class FsdpTrainer : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(WorldSizes, FsdpTrainer,
                         testing::ValuesIn(world_sizes()));

TEST_P(FsdpTrainer, NumbersBytesAndMemoryAreAsPredicted) {
  const int d = GetParam();
  for (const std::string& model : {tiny_gpt(), std::string("mlp")}) {
    for (const TrainerVariant& variant : variants(d)) {
      const bool is_gpt = model != "mlp";
      if (!is_gpt && (variant.how.recompute || (d != 2 && d != 3))) continue;
      sharded_test::expect_claims(
          train_language(d, tiny_options(model), variant.how),
          variant.name + ", " + model);
    }
  }
}

TEST_P(FsdpTrainer, MixedPrecisionIsPredictedToTheByte) {
  Options options = tiny_options(tiny_gpt());
  options.check = false;
  for (const char* strategy : {"fsdp", "fsdp2"}) {
    for (const char* reduce : {"", "f32"}) {
      for (const bool offload : {false, true}) {
        SCOPED_TRACE(testing::Message() << strategy << " reduce '" << reduce
                                        << "' offload " << offload);
        TrainerOptions how;
        how.strategy = strategy;
        how.param_dtype = "bf16";
        how.reduce_dtype = reduce;
        how.cpu_offload = offload;
        sharded_test::expect_bill(train_language(GetParam(), options, how));
      }
    }
  }
}

// --- What DDP cannot hold ------------------------------------------------------

TEST(FsdpCapacity, AModelThatDdpCannotHoldTrains) {
  Options options = tiny_options("gpt-nano");
  options.batch = 4;
  options.optimizer = "adamw";
  auto fits = [&](const std::string& strategy, const std::string& sharding) {
    TrainerOptions how;
    how.strategy = strategy;
    how.sharding_strategy = sharding;
    how.zero.persistence_threshold = 0;
    LaunchOptions launch;
    launch.device_memory_bytes = 2500 << 10;
    try {
      run_ranks(
          4,
          [&](ProcessGroup& world) {
            Trainer trainer(options, how, world);
            train(options, trainer.optimizer(), false,
                  [&](std::int64_t k) { return trainer.step(k); });
          },
          launch);
    } catch (const Error& error) {
      EXPECT_TRUE(has_text(error.what(), "memory")) << error.what();
      return false;
    }
    return true;
  };
  EXPECT_FALSE(fits("fsdp", "no_shard"));  // DDP
  EXPECT_TRUE(fits("fsdp", "full_shard"));
  EXPECT_TRUE(fits("fsdp2", "full_shard"));
  EXPECT_TRUE(fits("zero3", ""));
}

TEST(FsdpTrainerOptions, WhatDoesNotGoTogetherIsRefused) {
  Options options = tiny_options(tiny_gpt());
  auto error_of = [&](const TrainerOptions& how, int d = 2) {
    return error_on_ranks(
        d, [&](ProcessGroup& world) { Trainer trainer(options, how, world); });
  };
  TrainerOptions how;
  how.strategy = "zero3";
  how.micro_batches = 5;
  EXPECT_TRUE(has_text(error_of(how), "--micro-batches 5"));
  how.micro_batches = 1;
  how.param_dtype = "bf16";
  EXPECT_TRUE(has_text(error_of(how), "--strategy zero3: --param-dtype"));
  how.param_dtype = "";
  how.strategy = "fsdp";
  how.sharding_strategy = "hybrid_shard";
  EXPECT_TRUE(has_text(error_of(how),
                       "--shard-size 0: hybrid_shard needs a "
                       "divisor of --world-size 2"));
  how.sharding_strategy = "full_shard";
  how.strategy = "zero1";
  how.cpu_offload = true;
  EXPECT_TRUE(has_text(error_of(how), "--cpu-offload: with zero2"));
}

}  // namespace
}  // namespace shardbook::fsdp_test
