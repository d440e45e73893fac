// The bill of the program's strategy for every way to shard, and a peak derived
// by hand.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "chapters/03_zero_fsdp/zero_fsdp_strategy.h"
#include "tests/chapters/03_zero_fsdp/fsdp_support.h"
#include "tests/chapters/common/sharded_support.h"
#include "tests/support/errors.h"

namespace shardbook::fsdp_test {
namespace {

using zero_fsdp::check_given;
using zero_fsdp::shortest_dtype;
using zero_fsdp::StrategyOptions;
using zero_fsdp::ZeroFsdpStrategy;

Options language_options(const std::string& model = "gpt-nano") {
  Options options = tiny_options(model);
  options.check = false;
  options.batch = 4;
  return options;
}

Report run(int d, Options options, const StrategyOptions& setup) {
  options.world_size = d;
  return sharded_test::report_of<ZeroFsdpStrategy>(options, setup);
}

void expect_predicted(const Report& report, const std::string& name) {
  SCOPED_TRACE(name);
  sharded_test::expect_bill(report);
}

StrategyOptions of(const std::string& strategy) {
  return {.strategy = strategy};
}

TEST(ZeroFsdpBill, UnitsInsideUnitsArePredicted) {
  // 10000: blocks, their MLPs or attentions, alone and inside one another
  for (const std::int64_t numel : {10000, 17000, 30000}) {
    for (const char* strategy : {"fsdp", "fsdp2"}) {
      expect_predicted(run(2, language_options(),
                           {.strategy = strategy,
                            .wrap = "size",
                            .min_num_params = numel,
                            .recompute = numel == 17000}),
                       std::string(strategy) + " by " + std::to_string(numel));
    }
  }
  for (const char* sharding : {"full_shard", "shard_grad_op", "no_shard"}) {
    for (const bool no_sync : {false, true}) {
      expect_predicted(run(2, language_options(),
                           {.sharding_strategy = sharding,
                            .wrap = "size",
                            .min_num_params = 17000,
                            .micro_batches = 2,
                            .no_sync = no_sync}),
                       std::string(sharding) + (no_sync ? ", no_sync" : ""));
    }
  }
}

TEST(ZeroFsdpBill, GradientsLargerThanABucketArePredicted) {
  for (const char* model : {"gpt-nano", "mlp"}) {
    for (const char* strategy : {"zero1", "zero2"}) {
      for (const bool overlaps : {true, false}) {
        // Exceeded by all, most, some matrices, the table, only the head
        for (const std::int64_t size : {1, 5000, 13000, 16383, 16640}) {
          StrategyOptions setup{.strategy = strategy};
          setup.zero.reduce_bucket_size = size;
          setup.zero.overlap_comm = overlaps;
          expect_predicted(run(2, language_options(model), setup),
                           std::string(strategy) + " " + model +
                               ", buckets of " + std::to_string(size) +
                               (overlaps ? "" : ", no overlap"));
        }
      }
    }
  }
}

// Construction alone, and two steps whose master copies count.
TEST(ZeroFsdpBill, FewStepsInEveryDtypeArePredicted) {
  for (const char* model : {"gpt-nano", "mlp"}) {
    for (const char* strategy : {"zero1", "zero2", "zero3", "fsdp", "fsdp2"}) {
      for (const bool offload : {false, true}) {
        if (offload && std::string(strategy) == "zero1") continue;
        Options options = language_options(model);
        options.steps = 0;
        StrategyOptions setup{.strategy = strategy, .cpu_offload = offload};
        expect_predicted(run(2, options, setup),
                         std::string(strategy) + " " + model);
        if (strategy[0] == 'f') continue;
        setup.zero.accumulate_f32 = std::string(strategy) != "zero1";
        options.steps = 2;
        options.batch = 6;
        options.dtype = DType::kBF16;
        expect_predicted(run(3, options, setup),
                         std::string(strategy) + " bf16 " + model);
      }
    }
  }
}

TEST(ZeroFsdpBill, EveryThresholdOfZero3IsPredicted) {
  for (const char* model : {"gpt-nano", "mlp"}) {
    for (const std::int64_t threshold : {-1, 0, 300, 20000, 100000}) {
      for (const std::int64_t prefetch : {-1, 0, 60'000, 1 << 30}) {
        StrategyOptions setup{.strategy = "zero3"};
        setup.zero.persistence_threshold = threshold;
        setup.zero.prefetch_bucket_size = prefetch;
        // Room for one block of gpt-nano, but not for two
        if (prefetch == 60'000) setup.zero.max_live_parameters = 90'000;
        expect_predicted(run(2, language_options(model), setup),
                         std::string(model) + ", threshold " +
                             std::to_string(threshold) + ", prefetch " +
                             std::to_string(prefetch));
      }
    }
  }
}

// --- Closed formulas --------------------------------------------------------

/// gpt-nano, in elements.
constexpr double kH = 64, kVocab = 256, kPositions = 256, kBlocks = 4;

double padded(double numel, int d) { return d * std::ceil(numel / d); }

double peak(const RankReport& rank, MemoryKind kind) {
  return rank.peak[static_cast<std::size_t>(kind)].counted;
}

// Shards, the root, and the two largest neighbours among the blocks: one
// computes, the next is gathered.
TEST(ZeroFsdpFormula, ThePeakOfFsdpsParametersIsShardsTheRootAndTwoBlocks) {
  for (const int d : {2, 3, 4}) {
    const double root = padded((kVocab + kPositions + 2) * kH, d);
    const double block = padded(12 * kH * kH + 13 * kH, d);
    Options options = language_options();
    options.batch = 12;
    for (const RankReport& rank : run(d, options, of("fsdp")).ranks) {
      EXPECT_EQ(peak(rank, MemoryKind::kParameter),
                4 * ((root + kBlocks * block) / d + root + 2 * block));
    }
  }
}

// --- What the program chooses -----------------------------------------------

TEST(ZeroFsdpDefaults, ResultsAreComparedInTheShortestDtypeInUse) {
  const std::tuple<DType, const char*, const char*, DType> cases[] = {
      // Parameters, --param-dtype, --reduce-dtype, the shortest
      {DType::kF64, "", "", DType::kF64},
      {DType::kF64, "", "f32", DType::kF32},
      {DType::kF32, "", "f32", DType::kF32},
      {DType::kBF16, "", "f32", DType::kBF16},
      {DType::kF64, "f16", "f32", DType::kF16},
      {DType::kF64, "f32", "", DType::kF32}};
  for (const auto& [parameters, param, reduce, expected] : cases) {
    EXPECT_EQ(shortest_dtype(parameters,
                             {.param_dtype = param, .reduce_dtype = reduce}),
              expected);
  }
}

TEST(ZeroFsdpDefaults, OptionsOfAnotherStrategyAreRefusedByName) {
  auto error_of = [](const StrategyOptions& setup, const std::string& flag,
                     const std::string& value) -> std::string {
    return shardbook::error_of([&] {
      check_given(setup, {{"--steps", "3"}, {flag, value}});
    });
  };
  EXPECT_EQ(error_of(of("zero3"), "--sharding-strategy", "no_shard"),
            "--sharding-strategy no_shard: means nothing to --strategy zero3; "
            "it belongs to --strategy fsdp or fsdp2");
  const std::tuple<const char*, const char*, const char*> cases[] = {
      {"fsdp", "--overlap-comm", "--strategy zero1, zero2 or zero3"},
      {"zero3", "--reduce-bucket-size", "zero1 or zero2"},
      {"zero1", "--persistence-threshold", "--strategy zero3"},
      {"fsdp", "--shard-size", "belongs to hybrid_shard"},
      {"fsdp", "--min-num-params", "belongs to size"}};
  for (const auto& [strategy, flag, words] : cases) {
    expect_text(error_of(of(strategy), flag, "2"), {words});
  }
  const StrategyOptions setup{
      .strategy = "fsdp2", .sharding_strategy = "hybrid_shard", .wrap = "size"};
  EXPECT_EQ(error_of(setup, "--min-num-params", "2"), "");
  EXPECT_EQ(error_of(setup, "--shard-size", "2"), "");
  EXPECT_EQ(error_of(of("zero1"), "--overlap-comm", "true"), "");
}

TEST(ZeroFsdpFolding, FewRanksStandForAThousand) {
  Options options = language_options("gpt-175b");
  options.world_size = 1024;
  auto classes = [&](const StrategyOptions& setup) {
    const FoldClass class_of = zero_fsdp::fold_class(options, setup);
    std::vector<int> all;
    for (int rank = 0; rank < options.world_size; ++rank) {
      all.push_back(class_of(rank));
    }
    std::sort(all.begin(), all.end());
    return std::unique(all.begin(), all.end()) - all.begin();
  };
  for (const char* strategy : {"zero1", "zero2", "zero3", "fsdp"}) {
    EXPECT_EQ(classes(of(strategy)), 1) << strategy;
  }
  // 50257 rows of the table: 50 on ranks 0 to 1004, 7 on one, then none
  EXPECT_EQ(classes(of("fsdp2")), 3);
}

}  // namespace
}  // namespace shardbook::fsdp_test
