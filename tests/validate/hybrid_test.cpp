// A step over a mesh, against the chapters where they run the same job.

#include <gtest/gtest.h>

#include <utility>

#include "bench/validate/jobs.h"
#include "chapters/14_hybrid_3d/hybrid_strategy.h"
#include "chapters/planner/on_shapes.h"
#include "comm/device_mesh.h"

namespace shardbook::validate {
namespace {

HybridJob small_job() {
  HybridJob job;
  job.cluster = sim::Cluster::read("selene");
  job.sizes = {.hidden = 4096, .heads = 32, .seq = 2048, .vocabulary = 51200};
  job.layers = 8;
  job.layout.micro_batch = 2;
  return job;
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
    HybridJob job = small_job();
    job.layout.tp = each.tp;
    job.layout.cuts_tokens = each.cuts_tokens;
    job.micro_batches = 3;
    job.is_synchronous = false;
    EXPECT_NEAR(hybrid_step(job).seconds / each.chapter(job).seconds, 1, 0.03)
        << each.tp;
  }
}

// The chapter runs every rank, its engine and its buckets. It sends whole
// activations between stages, where we send parts: with tp 8, 6 % slower.
TEST(HybridStep, AgreesWithTheHybridChapter) {
  for (const auto& [tp, pp] :
       {std::pair(2, 2), std::pair(8, 4), std::pair(1, 4)}) {
    HybridJob job = small_job();
    job.layout.tp = tp;
    job.layout.dtype = job.gradient_dtype = DType::kBF16;
    job.layout.recompute = Recompute::kBlocks;
    job.pp = pp;
    job.dp = 2;
    job.micro_batches = 16;

    hybrid::HybridOptions setup;
    setup.tp = tp;
    setup.pp = pp;
    setup.micro_batches = job.micro_batches;
    setup.recompute = "always";
    const Options options = options_of(job);
    hybrid::check_legal(options, setup);
    const Report report = planner::train_on_shapes(
        options, hybrid::fold_class(setup),
        [&](const Options& options, ProcessGroup& world, shardbook::Run& run) {
          DeviceMesh mesh(world, hybrid::topology_of(setup));
          run.train(options, *hybrid::make_strategy(options, setup, mesh));
        });
    EXPECT_NEAR(hybrid_step(job).seconds / report.time.step_s, 1, 0.07)
        << "tp " << tp << ", pp " << pp;
  }
}

}  // namespace
}  // namespace shardbook::validate
