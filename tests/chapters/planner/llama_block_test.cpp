// Llama's block: the cost of its options in a step, by closed forms.

#include <gtest/gtest.h>

#include <initializer_list>
#include <string>

#include "chapters/planner/step.h"
#include "core/check.h"
#include "tests/chapters/common/textbook_support.h"
#include "tests/chapters/planner/planner_support.h"

namespace shardbook::planner {
namespace {

using textbook::expect_time;
using textbook::kRate;

constexpr double kHidden = 1024, kKeys = 256, kMlp = 3072, kRows = 2 * 512;

HybridJob llama_job(const std::string& cluster) {
  HybridJob job;
  job.cluster = sim::Cluster::read(cluster);
  job.sizes = {.hidden = 1024,
               .heads = 16,
               .seq = 512,
               .vocabulary = 4096,
               .kv_heads = 4,
               .mlp = 3072,
               .is_llama = true};
  job.layers = 4;
  job.layout.micro_batch = 2;
  job.layout.dtype = DType::kBF16;
  job.is_tied = false;
  return job;
}

// Keys, attention's output and up: the second, fourth and sixth product. Where
// tokens are cut, the fourth's sum over tp is kept.
TEST(LlamaBlock, ComputesEverySecondProductAgain) {
  for (const int tp : {1, 2, 4}) {
    HybridJob job = llama_job("textbook");
    job.layout.tp = tp;
    job.layout.cuts_tokens = tp > 1;
    const StageRun plain = run_blocks(job, 3);
    job.layout.recompute = Recompute::kEverySecondProduct;
    const StageRun selective = run_blocks(job, 3);
    EXPECT_EQ(selective.forward.s, plain.forward.s);
    const double output = tp == 1 ? kHidden * kHidden : 0;
    const double again =
        3 * 2 * kRows * (kHidden * kKeys + output + kHidden * kMlp) / tp;
    expect_time(selective.backward.s, plain.backward.s + again / kRate);
    job.layout.recompute = Recompute::kBlocks;
    EXPECT_GT(run_blocks(job, 3).backward.s, 1.1 * selective.backward.s);
  }
}

// Of three blocks, the first and the last.
TEST(LlamaBlock, ComputesEverySecondBlockAgain) {
  HybridJob job = llama_job("textbook");
  const double plain = run_blocks(job, 3).backward.s;
  job.layout.recompute = Recompute::kBlocks;
  const double all = run_blocks(job, 3).backward.s;
  job.layout.recompute = Recompute::kEverySecondBlock;
  expect_time(run_blocks(job, 3).backward.s, plain + 2 * (all - plain) / 3);
}

TEST(LlamaBlock, HasNoMemoryForEverySecondProduct) {
  HybridJob job = llama_job("textbook");
  job.layout.recompute = Recompute::kEverySecondProduct;
  EXPECT_THROW(step_memory(job), Error);
  job.sizes.is_llama = false;
  EXPECT_THROW(run_blocks(job, 1), Error);
  job.sizes.is_llama = true;
  job.sizes.is_gated = false;
  EXPECT_THROW(run_blocks(job, 1), Error);
}

/// The seconds an H100 needs to move this many bytes in one operation.
double streamed(const HybridJob& job, double bytes) {
  const sim::DeviceSpec& device = job.cluster.device;
  return (bytes + device.half_memory_bytes) /
         (device.memory_bytes_per_s * device.memory_efficiency);
}

/// Large enough that the device never waits for the host.
HybridJob large_job() {
  HybridJob job = llama_job("dgx-h100");
  job.sizes.hidden *= 8;
  job.sizes.heads *= 8;
  job.sizes.kv_heads *= 8;
  job.sizes.mlp *= 8;
  job.sizes.seq *= 8;
  return job;
}

TEST(LlamaBlock, ReadsAndWritesQueriesAndKeysOnceMoreToNormalise) {
  HybridJob job = large_job();
  const StageRun plain = run_blocks(job, 2);
  job.sizes.normalizes_heads = true;
  const StageRun normal = run_blocks(job, 2);
  const double bytes = 2 * 8 * kRows * 8 * (kHidden + kKeys);
  EXPECT_NEAR(normal.forward.s - plain.forward.s, 2 * streamed(job, 2 * bytes),
              1e-9);
  EXPECT_NEAR(normal.backward.s - plain.backward.s,
              2 * streamed(job, 3 * bytes), 1e-9);
}

// Stage runs are cached for equal jobs only.
TEST(LlamaBlock, KeepsNoStageForAJobThatNormalises) {
  HybridJob job = large_job();
  const double plain = hybrid_step(job).seconds;
  job.sizes.normalizes_heads = true;
  EXPECT_GT(hybrid_step(job).seconds, plain);
}

// A scale is the maximum of a tensor: the inputs of the four products and the
// gradients of their outputs are read once more.
TEST(LlamaBlock, ReadsOnceMoreForTheMaximumOfAScale) {
  HybridJob job = large_job();
  job.layout.converts_to_fp8 = true;
  const StageRun delayed = run_blocks(job, 2);
  job.layout.scales_by_maximum = true;
  const StageRun current = run_blocks(job, 2);
  const auto reads = [&](std::initializer_list<double> widths) {
    double seconds = 0;
    for (const double width : widths) {
      seconds += streamed(job, 2 * 8 * kRows * 8 * width);
    }
    return 2 * seconds;
  };
  EXPECT_NEAR(current.forward.s - delayed.forward.s,
              reads({kHidden, kHidden, kHidden, kMlp}), 1e-9);
  EXPECT_NEAR(current.backward.s - delayed.backward.s,
              reads({kHidden + 2 * kKeys, kHidden, 2 * kMlp, kHidden}), 1e-9);
}

}  // namespace
}  // namespace shardbook::planner
