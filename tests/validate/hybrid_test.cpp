// A step over a mesh, against the chapters where they run the same job. The
// planner's tests compare it with the hybrid chapter.

#include <gtest/gtest.h>

#include "bench/validate/jobs.h"

namespace shardbook::validate {
namespace {

// The chapters reduce the norm of all ranks, and read embeddings once.
TEST(HybridStep, EqualsTheChaptersOfOneAxis) {
  const struct {
    StepTime (*chapter)(const HybridJob&);
    int tp;
    bool cuts_tokens;
  } cases[] = {{on_one_device, 1, false},
               {with_tensor, 8, false},
               {with_megatron, 4, true}};
  for (const auto& each : cases) {
    HybridJob job;
    job.cluster = sim::Cluster::read("selene");
    job.sizes = {.hidden = 4096, .heads = 32, .seq = 2048, .vocabulary = 51200};
    job.layers = 8;
    job.layout.micro_batch = 2;
    job.layout.tp = each.tp;
    job.layout.cuts_tokens = each.cuts_tokens;
    job.micro_batches = 3;
    job.is_synchronous = false;
    EXPECT_NEAR(hybrid_step(job).seconds / each.chapter(job).seconds, 1, 0.03)
        << each.tp;
  }
}

}  // namespace
}  // namespace shardbook::validate
