// A step over a mesh, against the chapters where they run the same job.

#include <gtest/gtest.h>

#include <utility>

#include "bench/validate/jobs.h"
#include "chapters/planner/step.h"

namespace shardbook::validate {
namespace {

using planner::HybridJob;
using planner::Recompute;

HybridJob small_job() {
  HybridJob job;
  job.cluster = sim::Cluster::read("selene");
  job.sizes.hidden = 4096;
  job.sizes.heads = 32;
  job.sizes.seq = 2048;
  job.sizes.vocabulary = 51200;
  job.layers = 8;
  job.layout.micro_batch = 2;
  return job;
}

// The chapters reduce the norm of all ranks, and read embeddings once.
TEST(HybridStep, EqualsTheChaptersOfOneAxis) {
  const struct {
    Strategy strategy;
    int tp, dp;
    bool cuts_tokens;
  } cases[] = {{Strategy::kOneDevice, 1, 1, false},
               {Strategy::kTensor, 8, 1, false},
               {Strategy::kMegatron, 4, 1, true}};
  for (const auto& each : cases) {
    HybridJob hybrid = small_job();
    hybrid.layout.tp = each.tp;
    hybrid.layout.cuts_tokens = each.cuts_tokens;
    hybrid.micro_batches = 3;
    hybrid.is_synchronous = false;

    Job job;
    job.cluster = "selene";
    job.strategy = each.strategy;
    job.model.n_embd = 4096;
    job.model.n_head = 32;
    job.model.n_layer = 8;
    job.model.n_positions = job.seq = 2048;
    job.model.vocab_size = 51200;
    job.ranks = each.tp;
    job.micro_batch = 2;
    job.micro_batches = 3;
    job.dtype = DType::kF16;
    EXPECT_NEAR(hybrid_step(hybrid).seconds / step_time(job).seconds, 1, 0.03)
        << static_cast<int>(each.strategy);
  }
}

// The chapter runs every rank, its engine and its buckets. It sends whole
// activations between stages, where we send parts: with tp 8, 6 % slower.
TEST(HybridStep, AgreesWithTheHybridChapter) {
  for (const auto& [tp, pp] :
       {std::pair(2, 2), std::pair(8, 4), std::pair(1, 4)}) {
    HybridJob hybrid = small_job();
    hybrid.layout.tp = tp;
    hybrid.layout.dtype = hybrid.gradient_dtype = DType::kBF16;
    hybrid.layout.recompute = Recompute::kBlocks;
    hybrid.pp = pp;
    hybrid.dp = 2;
    hybrid.micro_batches = 16;

    Job job;
    job.cluster = "selene";
    job.strategy = Strategy::kHybrid;
    job.model.n_embd = 4096;
    job.model.n_head = 32;
    job.model.n_layer = 8;
    job.model.n_positions = job.seq = 2048;
    job.model.vocab_size = 51200;
    job.tp = tp;
    job.pp = pp;
    job.ranks = 2 * tp * pp;
    job.micro_batch = 2;
    job.micro_batches = 16;
    job.recompute = true;
    EXPECT_NEAR(hybrid_step(hybrid).seconds / step_time(job).seconds, 1, 0.07)
        << "tp " << tp << ", pp " << pp;
  }
}

}  // namespace
}  // namespace shardbook::validate
