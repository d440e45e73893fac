// A step over a mesh, against closed forms on the cluster `textbook`.

#include "chapters/planner/step.h"

#include <gtest/gtest.h>

#include "core/check.h"
#include "sim/cost_model.h"
#include "tests/chapters/common/textbook_support.h"

namespace shardbook::planner {
namespace {

using textbook::all_gather;
using textbook::all_reduce;
using textbook::reduce_scatter;

HybridJob small_job(const std::string& cluster) {
  HybridJob job;
  job.cluster = sim::Cluster::read(cluster);
  job.sizes = {.hidden = 1024, .heads = 16, .seq = 512, .vocabulary = 4096};
  job.layers = 8;
  job.layout.micro_batch = 2;
  return job;
}

/// Elements of a rank's stage: blocks, positions, and the embedding.
double block_parameters(double h, double t) {
  return 12 * h * h / t + 7 * h / t + 6 * h;
}

TEST(Stage, HoldsTheParametersOfItsLayers) {
  const HybridJob job = small_job("textbook");
  for (const int t : {1, 2, 4}) {
    StageLayout layout = job.layout;
    layout.tp = t;
    StageParts parts;
    parts.blocks = 3;
    const double blocks = 3 * block_parameters(1024, t);
    EXPECT_EQ(run_stage(job.cluster, job.sizes, layout, parts).parameters,
              blocks);
    parts.has_embedding = true;
    EXPECT_EQ(run_stage(job.cluster, job.sizes, layout, parts).parameters,
              blocks + 4096.0 * 1024 / t + 512 * 1024);
  }
}

// Every micro-batch is sent forward and back, by a rank that waits meanwhile.
TEST(HybridStep, MayWaitForItsMessages) {
  HybridJob job = small_job("textbook");
  job.pp = 2;
  job.micro_batches = 8;
  const double beside = hybrid_step(job).pipeline_s;
  job.waits_for_messages = true;
  const double bytes = 2.0 * 512 * 1024 * job.element();
  const double message =
      sim::CostModel(job.cluster).message(bytes, 0, 1).seconds;
  EXPECT_GT(message, 0);
  EXPECT_GE(hybrid_step(job).pipeline_s, beside + 12 * message);
}

// One micro-batch more costs the slowest stage's forward and backward.
TEST(HybridStep, RunsAsFastAsItsSlowestStage) {
  HybridJob job = small_job("textbook");
  job.pp = 4;
  const auto seconds = [&](std::int64_t micro_batches) {
    job.micro_batches = micro_batches;
    return hybrid_step(job).pipeline_s;
  };
  StageParts last;
  last.blocks = 2;
  last.has_head = true;
  const StageRun run = run_stage(job.cluster, job.sizes, job.layout, last);
  EXPECT_NEAR(seconds(17) - seconds(16), run.forward.s + run.backward.s, 1e-9);
}

TEST(HybridStep, HasSmallerBubblesWithMoreChunks) {
  HybridJob job = small_job("textbook");
  job.pp = 4;
  job.micro_batches = 4;
  const double whole = hybrid_step(job).pipeline_s;
  job.chunks = 2;
  EXPECT_LT(hybrid_step(job).pipeline_s, 0.85 * whole);
}

TEST(HybridStep, LeavesEmbeddingAndHeadALayerLess) {
  HybridJob job = small_job("textbook");
  job.pp = 2;
  job.layers = 6;  // with two more, 8 = 2 x 4
  job.chunks = 4;
  job.micro_batches = 2;
  EXPECT_GT(hybrid_step(job).seconds, 0);
  job.layers = 7;
  EXPECT_THROW(hybrid_step(job), Error);
}

TEST(HybridStep, ReducesTheGradientsOfTheFullestRank) {
  HybridJob job = small_job("textbook");
  job.layout.tp = 2;
  job.dp = 4;
  // The embedding, which is also the head, counts once
  const double parameters =
      8 * block_parameters(1024, 2) + 4096.0 * 1024 / 2 + 512 * 1024 + 2 * 1024;
  EXPECT_NEAR(hybrid_step(job).gradients_s, all_reduce(4, 2 * parameters),
              1e-12);
  job.zero_stage = 1;
  job.gradient_dtype = DType::kF32;
  EXPECT_NEAR(hybrid_step(job).gradients_s,
              reduce_scatter(4, 4 * parameters) + all_gather(4, 2 * parameters),
              1e-12);
  job.overlaps_gradients = true;
  EXPECT_LT(hybrid_step(job).gradients_s, reduce_scatter(4, 4 * parameters));
}

// Two stages share a table: its gradients are summed.
TEST(HybridStep, SumsTheTiedEmbedding) {
  HybridJob job = small_job("textbook");
  job.pp = 2;
  EXPECT_NEAR(hybrid_step(job).gradients_s, all_reduce(2, 2 * 4096.0 * 1024),
              1e-12);
  job.is_tied = false;
  EXPECT_EQ(hybrid_step(job).gradients_s, 0);
}

TEST(HybridStep, RefusesMoreRanksThanDevices) {
  HybridJob job = small_job("kaggle-t4x2");
  job.dp = 3;
  EXPECT_THROW(hybrid_step(job), Error);
}

}  // namespace
}  // namespace shardbook::planner
