// What bench/validation.md says of our predictions.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <numeric>

#include "bench/validate/jobs.h"
#include "bench/validate/table_rows.h"
#include "bench/validate/validation.h"
#include "chapters/planner/plan_report.h"
#include "tests/support/files.h"
#include "tests/support/widths.h"
#include "tests/validate/validate_support.h"

namespace shardbook::validate {
namespace {

/// Predicted once, however many tests ask.
const Validation& of(const char* file) {
  static std::map<std::string, Validation> done;
  const auto found = done.find(file);
  if (found != done.end()) return found->second;
  const Validation& result =
      done.emplace(file, validate(open_table(test::own_table(file))))
          .first->second;
  std::printf("%s: MAPE %.1f %%, one constant %.1f %%\n", file,
              100 * result.aimed_mape, 100 * result.null_mape);
  return result;
}

/// Each is recognised by its columns.
struct Published {
  const char *file, *kind;
  std::size_t num_predicted, num_not_expressed = 0;
};

class PublishedTable : public testing::TestWithParam<Published> {};

TEST_P(PublishedTable, MeetsItsAimAndBeatsOneConstant) {
  const Published& table = GetParam();
  const Validation& result = of(table.file);
  EXPECT_EQ(result.kind->name, table.kind);
  EXPECT_EQ(result.outcomes.size(), table.num_predicted);
  EXPECT_EQ(result.not_expressed.size(), table.num_not_expressed);
  EXPECT_TRUE(result.meets_aim) << as_text(result);
  expect_fits_terminal(as_text(result));
  EXPECT_LT(result.mape, result.null_mape);
}

const Published kTables[] = {
    {"zero_table1_memory.csv", "zero_table1_memory", 54},
    {"zero_bubble_table5.csv", "zero_bubble_table5", 36},
    {"zero_bubble_automatic.csv", "zero_bubble_automatic", 24},
    {"zero_table2_max_model.csv", "zero_table2_max_model", 20},
    {"deepspeed_memory_estimator.csv", "deepspeed_memory_estimator", 32},
    {"gpipe_table1_memory.csv", "gpipe_table1_memory", 14},
    {"gpipe_table2_3_throughput.csv", "gpipe_throughput", 24},
    {"torchgpipe_benchmarks.csv", "torchgpipe", 23, 5},
    {"pytorch_mp_tutorial.csv", "pytorch_mp_tutorial", 4},
    {"nccl_allreduce_lut_a100_v100.csv", "nccl_collectives", 120},
    {"nccl_allreduce_h100_8gpu.csv", "nccl_collectives", 32},
    {"llama3_table4.csv", "jobs", 3},
    {"torchtitan_llama.csv", "jobs", 18, 2},
    {"nccl_busbw_reference.csv", "nccl_busbw_reference", 12},
    {"bloom_prequel_a100.csv", "jobs", 27},
    {"megascale_table2.csv", "jobs", 2},
    {"nemo_long_sequence.csv", "jobs", 9},
    {"zero_bubble_table4.csv", "jobs", 12},
    {"deepspeed_azure_zero3.csv", "jobs", 17},
    {"megatron_sc21_table2_zero3.csv", "jobs", 12},
    {"megatron_sc21_table1.csv", "jobs", 10},
    {"megatron_jan2021_table.csv", "jobs", 10},
    {"vtrain_a100_single_node.csv", "jobs", 720},
    {"mpt_fsdp_a100_h100.csv", "jobs", 152},
    {"dgxc_h100_gb200_scaling.csv", "jobs", 30},
    {"nemo_megatron_bridge_perf.csv", "jobs", 31},
    {"megatron_ci_memory_time.csv", "megatron_ci_memory", 161, 102},
    {"korthikanti_table4_layer.csv", "korthikanti_table4_layer", 8, 1},
    {"korthikanti_table5_e2e.csv", "jobs", 8},
    {"megatron_2020_tp_weak_scaling.csv", "jobs", 8},
};

INSTANTIATE_TEST_SUITE_P(All, PublishedTable, testing::ValuesIn(kTables),
                         [](const auto& info) {
                           std::string name = info.param.file;
                           name.resize(name.find('.'));
                           std::erase(name, '_');
                           return name;
                         });

// Twice the ranks at half the micro-batch: ZeRO-3 more than halves its speed.
TEST(PublishedTable, ZeroStage3CollapsesAtScale) {
  const Validation& result = of("megatron_sc21_table2_zero3.csv");
  for (const std::size_t first : {0u, 3u}) {
    for (const std::size_t i : {first, first + 1}) {
      EXPECT_GT(result.outcomes[i].pair.predicted,
                1.4 * result.outcomes[i + 1].pair.predicted);
    }
  }
}

// Of F + R + B = 1 + 1 + 2, the bubble has F and B where recomputation begins
// early: K stages are at most 4 K M / (4 M + 3 (K - 1)) times as fast as one
// device that recomputes as well.
TEST(PublishedTable, GPipesSpeedStaysWithinTheBubble) {
  HybridJob job;
  job.cluster = cluster_named("p100-pcie");
  job.sizes = {.hidden = 2048, .heads = 16, .seq = 256, .vocabulary = 50257};
  job.layers = 14;  // with embedding and head, 16 layers
  job.layout.dtype = DType::kF32;
  job.layout.recompute = Recompute::kBlocks;
  job.micro_batches = 8;
  const double alone = on_one_device(job).seconds;
  double before = 1;
  for (const int stages : {2, 4, 8}) {
    job.pp = stages;
    const double speed = alone / with_gpipe(job, options_of(job)).seconds;
    EXPECT_LT(speed, 4.0 * stages * 8 / (4.0 * 8 + 3.0 * (stages - 1)));
    EXPECT_GT(speed, before);
    before = speed;
  }
}

TEST(PublishedTable, KorthikantisStepsAreInOrder) {
  EXPECT_EQ(of("korthikanti_table5_e2e.csv").contests.spearman, 1);
}

// Two rows of the smallest model have half of the speed of others with equal
// settings. They stand apart.
TEST(PublishedTable, ExpertsAreWithinTenPercent) {
  std::vector<Pair> pairs;
  for (const Outcome& each : of("nemo_megatron_bridge_perf.csv").outcomes) {
    if (each.is_aimed_at && each.row.rfind("LLAMA", 0) != 0) {
      pairs.push_back(each.pair);
    }
  }
  EXPECT_EQ(pairs.size(), 16u);
  EXPECT_LT(mape(pairs), 0.10);
  EXPECT_LT(mape(pairs), null_mape(pairs));
}

// Formulae without a fitted constant, and torch's own counts.
TEST(PublishedTable, MegatronsMemoryIsWithinTwoPercent) {
  const Validation& result = of("megatron_ci_memory_time.csv");
  EXPECT_LT(result.mape, 0.02);
  for (const Outcome& each : result.outcomes) {
    EXPECT_LT(std::abs(relative_error(each.pair)), 0.11) << each.row;
  }
}

// The prediction picks a good way to lay a model over one node.
TEST(PublishedTable, VtrainsPlansAreInOrder) {
  const Validation& result = of("vtrain_a100_single_node.csv");
  EXPECT_EQ(result.contests.count, 72);
  EXPECT_GE(result.contests.spearman, 0.95);
  EXPECT_LE(result.contests.regret, 0.04);
}

TEST(PublishedTable, RingAttentionBeatsOneConstant) {
  const Validation& result = of("ring_flash_attention.csv");
  EXPECT_LT(result.mape, 0.08);
  EXPECT_GT(result.null_mape, 0.2);
}

// What PyTorch reaches on an H100 is fitted to the first row. The others have twice
// as many devices, and sequences that are 16 times as long.
TEST(PublishedTable, Llama3sOtherRowsFollowFromTheFirst) {
  const Validation& result = of("llama3_table4.csv");
  ASSERT_EQ(result.outcomes.size(), 3u);
  for (const Outcome& each : result.outcomes) {
    EXPECT_LT(std::abs(relative_error(each.pair)), 0.02) << each.row;
  }
  // The rate of the first row would not do
  const double first = result.outcomes[0].pair.published;
  EXPECT_GT(first / result.outcomes[1].pair.published, 1.07);
  EXPECT_GT(first / result.outcomes[2].pair.published, 1.13);
}

// To which nothing is fitted: the speed of software `pytorch` on an H100 follows
// from Llama 3's first row, at 500 W by the cube root of the power.
TEST(PublishedTable, OtherH100sFollowFromLlama3) {
  const auto error_of = [](const char* file, const auto& is_meant) {
    const Table table = open_table(test::own_table(file));
    std::vector<Pair> pairs;
    for (const Row& row : table.rows) {
      if (!is_meant(row)) continue;
      const std::vector<Outcome> one =
          recognise(file, table.columns).predict(row);
      pairs.push_back(one[0].pair);
    }
    std::printf("%s, %zu rows: MAPE %.1f %%, one constant %.1f %%\n", file,
                pairs.size(), 100 * mape(pairs), 100 * null_mape(pairs));
    return mape(pairs);
  };
  EXPECT_LT(error_of("mpt_fsdp_a100_h100.csv",
                     [](const Row& row) {
                       return row.text("cluster") == "dgx-h100";
                     }),
            0.08);
  const auto is_fsdp = [](const Row& row) {
    return !row.has("tp") && !row.has("cp");
  };
  EXPECT_LT(error_of("torchtitan_llama.csv", is_fsdp), 0.05);
}

// What `plan` says of its own answers.
TEST(PublishedTable, MeasuredErrorsAreThoseOfThePlanner) {
  std::map<std::pair<std::string, std::string>, std::vector<double>> errors;
  for (const Published& each : kTables) {
    if (each.kind != std::string("jobs")) continue;
    for (const Row& row : open_table(test::own_table(each.file)).rows) {
      try {
        const Outcome outcome = job(row)[0];
        const HybridJob of = read_job(row);
        if (!outcome.is_aimed_at) continue;
        errors[{planner::family_of(of.cluster), planner::kind_of(of)}]
            .push_back(100 * std::abs(relative_error(outcome.pair)));
      } catch (const NotExpressed&) {
      }
    }
  }
  std::string rows;
  for (const auto& [of, all] : errors) {
    const double mean = std::accumulate(all.begin(), all.end(), 0.0) /
                        static_cast<double>(all.size());
    const double most = *std::max_element(all.begin(), all.end());
    rows += fmt::format("    {{\"{}\", \"{}\", {}, {:.1f}, {:.0f}}},\n",
                        of.first, of.second, all.size(), mean, most);
  }
  const std::string source = read_bytes(std::string(SHARDBOOK_ROOT) +
                                        "/chapters/planner/measured.cpp");
  EXPECT_NE(source.find("kAll[] = {\n" + rows + "};"), std::string::npos)
      << rows;
}

// Their rates are far off where we assume sizes.
TEST(PublishedTable, LongSequencesAreInOrder) {
  for (const auto& [table, contests] :
       {std::pair{Published{"ring_flash_attention.csv", "ring_flash_attention",
                            16, 16},
                  4},
        std::pair{Published{"ulysses_charts.csv", "ulysses_charts", 24, 32},
                  9}}) {
    const Validation& result = of(table.file);
    EXPECT_EQ(result.kind->name, table.kind);
    EXPECT_EQ(result.outcomes.size(), table.num_predicted);
    EXPECT_EQ(result.not_expressed.size(), table.num_not_expressed);
    EXPECT_EQ(result.contests.count, contests);
    EXPECT_TRUE(result.meets_aim) << as_text(result);
  }
}

}  // namespace
}  // namespace shardbook::validate
