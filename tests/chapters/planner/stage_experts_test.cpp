// Stages with experts: closed forms on the cluster `textbook`.

#include <gtest/gtest.h>

#include <cmath>

#include "chapters/planner/step.h"
#include "core/check.h"
#include "tests/chapters/common/textbook_support.h"
#include "tests/chapters/planner/planner_support.h"

namespace shardbook::planner {
namespace {

using textbook::expect_time;
using textbook::kRate;

/// A token visits two of eight experts; heads are wider than hidden / heads.
HybridJob job_with_experts(const std::string& cluster = "textbook") {
  HybridJob job;
  job.cluster = sim::Cluster::read(cluster);
  job.sizes = {.hidden = 256,
               .heads = 4,
               .seq = 64,
               .vocabulary = 1024,
               .kv_heads = 2,
               .mlp = 384,
               .head_dim = 128,
               .experts = 8,
               .experts_per_token = 2,
               .is_llama = true};
  job.layers = 4;
  job.layout.micro_batch = 2;
  job.is_tied = false;
  return job;
}

/// Weights of attention and router of one block, and of one expert.
constexpr double kAttention = 256 * (4 + 2 * 2) * 128 + 4 * 128 * 256;
constexpr double kRouter = 256 * 8;
constexpr double kExpert = 3 * 256 * 384;
constexpr double kTokens = 2 * 64;
/// Pairs on or below the diagonal, times the width of all heads.
double pairs(double tokens) { return tokens * (tokens + 1) / 2 * 4 * 128; }

TEST(ExpertStage, HoldsItsShareOfTheExperts) {
  for (const int ep : {1, 2, 4, 8}) {
    HybridJob job = job_with_experts();
    job.layout.ep = ep;
    const StageRun run = run_blocks(job, 3);
    EXPECT_EQ(run.expert_parameters, 3 * 8 * kExpert / ep);
    EXPECT_EQ(run.parameters - run.expert_parameters,
              3 * (kAttention + kRouter + 2 * 256));
  }
}

// Each token has two experts on any ranks; two all-to-alls send it there and
// back, and two more its gradients.
TEST(ExpertStage, TakesTheTimeOfItsProductsAndMessages) {
  for (const int ep : {1, 2, 4, 8}) {
    HybridJob job = job_with_experts();
    job.layout.ep = ep;
    const double forward =
        2 * kTokens * (kAttention + kRouter + 2 * kExpert) / kRate +
        2 * 2 * 2 * pairs(64) / kRate;
    const double messages = 2 * textbook::all_gather(ep, 2 * kTokens * 256 * 2);
    const StageRun run = run_blocks(job, 1);
    expect_time(run.forward.s, forward + messages);
    EXPECT_GT(run.backward.s, 2 * forward + messages);
  }
}

// tp ranks cut the tokens, and are part of the expert group.
TEST(ExpertStage, TensorParallelRanksSendTheirOwnTokens) {
  HybridJob job = job_with_experts();
  job.layout.tp = 2;
  job.layout.cuts_tokens = true;
  job.layout.ep = 4;
  const double own = kTokens / 2, whole = kTokens * 256 * 2;
  const double forward =
      2 * kTokens * kAttention / 2 / kRate +
      2 * own * (kRouter + 2 * kExpert) / kRate + 2 * 2 * pairs(64) / kRate +
      textbook::all_gather(2, whole) + textbook::reduce_scatter(2, whole) +
      2 * textbook::all_gather(4, 2 * own * 256 * 2);
  expect_time(run_blocks(job, 1).forward.s, forward);
}

TEST(ExpertStage, EverySecondBlockHasAWindow) {
  HybridJob job = job_with_experts();
  const double all = run_blocks(job, 2).forward.s;
  job.sizes.window = 8;
  const double saved = 2 * 2 * 2 * (pairs(64) - 4 * pairs(16)) / kRate;
  EXPECT_NEAR(all - run_blocks(job, 2).forward.s, saved, 1e-9 * all);
  EXPECT_NEAR(all - run_blocks(job, 3).forward.s,
              2 * saved + all - run_blocks(job_with_experts(), 3).forward.s,
              1e-9 * all);
}

// Products of several experts run at the speed of grouped products; a single
// expert's, and all others, do not.
TEST(ExpertStage, GroupedProductsAreSlower) {
  HybridJob job = job_with_experts("dgx-a100");
  job.sizes.hidden = job.sizes.mlp = 4096;
  job.sizes.seq = 4096;
  const auto forward = [&](double efficiency) {
    job.cluster.device.grouped_efficiency = efficiency;
    return run_blocks(job, 1).forward.s;
  };
  const double whole = forward(1), half = forward(0.5) - whole;
  EXPECT_GT(half, 0.2 * whole);
  EXPECT_NEAR((forward(0.25) - whole) / half, 3, 1e-6);
  job.layout.ep = 8;
  EXPECT_EQ(forward(0.5), forward(1));
}

// Two of eight experts, on two nodes: with one copy per node a token leaves its
// node in 3 of 4 cases, otherwise once on average.
TEST(ExpertStage, OneCopyPerNodeShortensTheMessagesBetweenNodes) {
  HybridJob job = job_with_experts("dgx-h100");
  job.sizes.experts = 16;
  job.sizes.seq = 4096;
  job.layout.ep = 16;
  const double all = run_blocks(job, 1).forward.s;
  job.layout.sends_once_per_node = true;
  const double once = run_blocks(job, 1).forward.s;
  EXPECT_LT(once, all);
  HybridJob faster = job;
  faster.layout.sends_once_per_node = false;
  faster.cluster.network.bytes_per_s *= 1 / (1 - std::pow(0.5, 2));
  EXPECT_DOUBLE_EQ(once, run_blocks(faster, 1).forward.s);
  // Within a node nothing changes
  job.layout.ep = 8;
  faster = job;
  faster.layout.sends_once_per_node = false;
  EXPECT_EQ(run_blocks(job, 1).forward.s, run_blocks(faster, 1).forward.s);
}

// Shared weights are summed over all replicas, experts over the replicas that
// hold the same ones.
TEST(ExpertStep, SumsExpertsOverTheirOwnRanks) {
  for (const int ep : {1, 2, 4, 8}) {
    HybridJob job = job_with_experts();
    job.layout.ep = ep;
    job.dp = 8;
    job.zero_stage = 1;
    const double experts = 4 * 8 * kExpert / ep;
    // Positions come with the embedding, a shift with the last norm
    const double shared = 4 * (kAttention + kRouter + 2 * 256) +
                          2 * 1024 * 256 + 64 * 256 + 2 * 256;
    const auto both_ways = [](int ranks, double parameters) {
      return textbook::reduce_scatter(ranks, 2 * parameters) +
             textbook::all_gather(ranks, 2 * parameters);
    };
    const planner::HybridStep step = hybrid_step(job);
    expect_time(step.gradients_s,
                both_ways(8, shared) + both_ways(8 / ep, experts));
  }
}

TEST(ExpertStage, RefusesWhatDoesNotDivide) {
  HybridJob job = job_with_experts();
  job.layout.ep = 3;
  EXPECT_THROW(run_blocks(job, 1), Error);
  job.layout.ep = 4;
  job.layout.cp = 2;
  EXPECT_THROW(run_blocks(job, 1), Error);
  job.layout.cp = 1;
  job.layout.tp = 2;  // whose ranks have the same tokens
  EXPECT_THROW(run_blocks(job, 1), Error);
  job = job_with_experts();
  job.sizes.is_llama = false;
  EXPECT_THROW(run_blocks(job, 1), Error);
}

}  // namespace
}  // namespace shardbook::planner
