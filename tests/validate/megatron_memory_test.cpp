// Megatron-LM's memory: published terms, and the book's own counts.

#include "bench/validate/megatron_memory.h"

#include <gtest/gtest.h>

#include "core/check.h"

namespace shardbook::validate {
namespace {

/// Korthikanti et al. 2022, table 3: 22B on 8 devices.
HybridJob job_of_22b() {
  HybridJob job;
  job.cluster = sim::Cluster::read("textbook");
  job.sizes = {.hidden = 6144, .heads = 64, .seq = 2048, .vocabulary = 51200};
  job.layers = 48;
  job.layout.tp = 8;
  job.layout.micro_batch = 4;
  return job;
}

// Their figure 7, in units of s b h.
TEST(MegatronMemory, KeepsWhatKorthikantiPrintsOfALayer) {
  HybridJob job = job_of_22b();
  const double unit = 2048.0 * 4 * 6144;
  EXPECT_NEAR(layer_activations(job, false) / unit, 26.33, 0.005);
  job.layout.cuts_tokens = true;
  EXPECT_NEAR(layer_activations(job, false) / unit, 17.58, 0.005);
  // Without scores: their selective recomputation, 4.25, and what a fused
  // attention keeps beside it
  const double sums = 4.0 * 2048 * 4 * 64 / 8;
  EXPECT_NEAR((layer_activations(job, true) - sums) / unit - 2.0 / 8, 4.25,
              0.005);
  job.layout.cuts_tokens = false;
  job.layout.recompute = Recompute::kBlocks;
  EXPECT_DOUBLE_EQ(layer_activations(job, false) / unit, 2);
}

// The oracle is the chapters' own stage, whose parameters are counted.
TEST(MegatronMemory, CountsTheParametersOfAStage) {
  for (const int tp : {1, 2, 4}) {
    for (const int pp : {1, 2, 4}) {
      HybridJob job;
      job.sizes = {.hidden = 64, .heads = 8, .seq = 32, .vocabulary = 512};
      job.layers = 8;
      job.layout.tp = tp;
      job.pp = pp;
      job.is_tied = false;
      const planner::StageParts parts = {job.layers / pp, pp == 1, true};
      const planner::StageRun run = planner::run_stage(
          sim::Cluster::read("textbook"), job.sizes, job.layout, parts);
      EXPECT_DOUBLE_EQ(last_stage_parameters(job), run.parameters)
          << "tp " << tp << " pp " << pp;
      if (pp > 1) continue;
      job.is_tied = true;
      EXPECT_DOUBLE_EQ(last_stage_parameters(job),
                       run.parameters - 512.0 * 64 / tp);
    }
  }
}

TEST(MegatronMemory, SplitsTheOptimizerOverReplicas) {
  HybridJob job = job_of_22b();
  job.dp = 4;
  const double parameters = last_stage_parameters(job);
  MegatronSoftware software;
  job.layout.dtype = DType::kBF16;
  EXPECT_DOUBLE_EQ(megatron_memory(job, software).states, 18 * parameters);
  job.zero_stage = 1;
  EXPECT_DOUBLE_EQ(megatron_memory(job, software).states,
                   (6 + 12.0 / 4) * parameters);
  job.layout.dtype = DType::kF16;
  EXPECT_DOUBLE_EQ(megatron_memory(job, software).states,
                   (4 + 12.0 / 4) * parameters);
}

TEST(MegatronMemory, LogitsAreKeptTwice) {
  const HybridJob job = job_of_22b();
  EXPECT_DOUBLE_EQ(megatron_memory(job, {}).loss, 6.0 * 4 * 2048 * 51200 / 8);
}

TEST(MegatronMemory, RefusesWhatItHasNoFormulaFor) {
  HybridJob job = job_of_22b();
  job.chunks = 2;
  EXPECT_THROW(megatron_memory(job, {}), Error);
  job.chunks = 1;
  job.pp = 5;
  EXPECT_THROW(megatron_memory(job, {}), Error);
}

}  // namespace
}  // namespace shardbook::validate
