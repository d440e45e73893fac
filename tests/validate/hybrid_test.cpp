// A step over a mesh, against the chapters where they run the same job. The
// planner's tests compare it with the hybrid chapter.

#include <gtest/gtest.h>

#include "bench/validate/jobs.h"
#include "chapters/07_tensor_parallel/tensor_parallel_strategy.h"
#include "chapters/planner/on_shapes.h"

namespace shardbook::validate {
namespace {

StepTime with_tensor(const HybridJob& job) {
  tensor_parallel::StrategyOptions setup;
  setup.micro_batches = job.micro_batches;
  const Report report = planner::train_on_shapes(
      options_of(job), one_class,
      [&](const Options& options, ProcessGroup& world, Run& run) {
        tensor_parallel::TensorParallelStrategy strategy(options, setup, world);
        strategy.optimizer().keep_master_copies();
        run.train(options, strategy);
      });
  return {report.time.step_s, report.time.trust};
}

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
