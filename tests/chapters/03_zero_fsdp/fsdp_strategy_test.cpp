// The program's strategy: parity, bytes and memory held, for every way to shard.

#include <gtest/gtest.h>

#include "chapters/03_zero_fsdp/zero_fsdp_strategy.h"
#include "tests/chapters/03_zero_fsdp/fsdp_support.h"
#include "tests/chapters/common/sharded_support.h"
#include "tests/support/sanitized.h"

namespace shardbook::fsdp_test {
namespace {

using zero_fsdp::StrategyOptions;
using zero_fsdp::ZeroFsdpStrategy;

Report train_language(int d, Options options, const StrategyOptions& setup) {
  options.world_size = d;
  return sharded_test::report_of<ZeroFsdpStrategy>(options, setup);
}

struct ShardedRun {
  std::string name;
  StrategyOptions setup;
};

std::vector<ShardedRun> variants(int d) {
  const std::int64_t pieces = d == 3 ? 4 : 3;
  std::vector<ShardedRun> all;
  for (const std::string name : {"zero1", "zero2", "zero3", "fsdp", "fsdp2"}) {
    const auto add = [&](const std::string& what, auto change) {
      StrategyOptions setup;
      setup.strategy = name;
      change(setup);
      all.push_back({name + what, setup});
    };
    add("", [](auto&) {});
    add(" recompute", [](auto& s) { s.recompute = true; });
    add(" accumulate", [&](auto& s) { s.micro_batches = pieces; });
    if (name[0] == 'z') {
      if (name == "zero1") continue;
      add(" offload", [](auto& s) {
        s.cpu_offload = true;
        s.zero.sub_group_size = 100;
      });
      continue;
    }
    add(" no_sync", [&](auto& s) {
      s.micro_batches = pieces;
      s.no_sync = true;
    });
    for (const std::string sharding : {"shard_grad_op", "no_shard"}) {
      for (const std::int64_t m : {std::int64_t{1}, pieces}) {
        add(" " + sharding, [&](auto& s) {
          s.sharding_strategy = sharding;
          s.micro_batches = m;
        });
      }
    }
    add(" forward prefetch, post", [](auto& s) {
      s.fsdp.forward_prefetch = true;
      s.backward_prefetch = "post";
    });
    add(" no prefetch, offload", [](auto& s) {
      s.backward_prefetch = "none";
      s.cpu_offload = true;
    });
    add(" one unit", [](auto& s) { s.wrap = "none"; });
    add(" by size", [](auto& s) {
      s.wrap = "size";
      s.min_num_params = 3000;
    });
    if (d % 2 != 0) continue;
    add(" hybrid", [&](auto& s) {
      s.sharding_strategy = "hybrid_shard";
      s.fsdp.shard_size = d / 2;
    });
  }
  return all;
}

class FsdpTraining : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(WorldSizes, FsdpTraining,
                         testing::ValuesIn(world_sizes()));

TEST_P(FsdpTraining, NumbersBytesAndMemoryAreAsPredicted) {
  const int d = GetParam();
  for (const std::string model : {kTinyGpt, "mlp"}) {
    for (const ShardedRun& variant : variants(d)) {
      const bool is_gpt = model != "mlp";
      if (!is_gpt && (variant.setup.recompute || (d != 2 && d != 3))) continue;
      sharded_test::expect_claims(
          train_language(d, tiny_options(model), variant.setup),
          variant.name + ", " + model);
    }
  }
}

TEST_P(FsdpTraining, MixedPrecisionIsPredictedToTheByte) {
  Options options = tiny_options(kTinyGpt);
  options.check = false;
  for (const char* strategy : {"fsdp", "fsdp2"}) {
    for (const char* reduce : {"", "f32"}) {
      for (const bool offload : {false, true}) {
        SCOPED_TRACE(testing::Message() << strategy << " reduce '" << reduce
                                        << "' offload " << offload);
        StrategyOptions setup;
        setup.strategy = strategy;
        setup.param_dtype = "bf16";
        setup.reduce_dtype = reduce;
        setup.cpu_offload = offload;
        sharded_test::expect_bill(train_language(GetParam(), options, setup));
      }
    }
  }
}

// --- What DDP cannot hold ----------------------------------------------------

TEST(FsdpCapacity, AModelThatDdpCannotHoldTrains) {
  Options options = tiny_options("gpt-nano");
  options.batch = 4;
  options.optimizer = "adamw";
  auto fits = [&](const std::string& strategy,
                  const std::string& sharding = "full_shard") {
    StrategyOptions setup;
    setup.strategy = strategy;
    setup.sharding_strategy = sharding;
    setup.zero.persistence_threshold = 0;
    LaunchOptions launch;
    launch.device_memory_bytes = 2500 << 10;
    const std::string error = error_of([&] {
      run_ranks(
          4,
          [&](ProcessGroup& world) {
            ZeroFsdpStrategy strategy(options, setup, world);
            train(options, strategy.optimizer(), false,
                  [&](std::int64_t k) { return strategy.step(k); });
          },
          launch);
    });
    if (!error.empty()) expect_text(error, {"memory"});
    return error.empty();
  };
  EXPECT_FALSE(fits("fsdp", "no_shard"));  // DDP
  EXPECT_TRUE(fits("fsdp"));
  EXPECT_TRUE(fits("fsdp2"));
  EXPECT_TRUE(fits("zero3"));
}

TEST(FsdpTrainingOptions, WhatDoesNotGoTogetherIsRefused) {
  const Options options = tiny_options(kTinyGpt);
  const std::pair<StrategyOptions, const char*> cases[] = {
      {{.strategy = "zero3", .micro_batches = 5}, "--micro-batches 5"},
      {{.sharding_strategy = "hybrid_shard"},
       "--shard-size 0: hybrid_shard needs a divisor of --world-size 2"},
      {{.strategy = "zero1", .cpu_offload = true},
       "--cpu-offload: with zero2"}};
  for (const auto& [setup, words] : cases) {
    expect_text(error_on_ranks(2,
                               [&, setup = setup](ProcessGroup& world) {
                                 ZeroFsdpStrategy strategy(options, setup,
                                                           world);
                               }),
                {words});
  }
}

}  // namespace
}  // namespace shardbook::fsdp_test
