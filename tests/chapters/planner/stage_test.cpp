// A layer, run alone: its time on the cluster `textbook` and what it keeps,
// against closed forms.

#include "chapters/planner/stage.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "core/check.h"
#include "tests/chapters/common/textbook_support.h"
#include "tests/chapters/planner/planner_support.h"

namespace shardbook::planner {
namespace {

using textbook::all_gather;
using textbook::all_reduce;
using textbook::expect_time;
using textbook::kRate;
using textbook::reduce_scatter;

/// Forward products of a layer over t ranks: of queries, keys and values (c),
/// attention (k), its output (p), and the MLP (f, g).
struct Products {
  double c, k, p, f, g;
  double all() const { return c + k + p + f + g; }
};

struct Layer {
  std::int64_t t, batch, seq, hidden, heads;

  HybridJob job() const {
    HybridJob job;
    job.cluster = sim::Cluster::read("textbook");
    job.layout.tp = static_cast<int>(t);
    job.layout.micro_batch = batch;
    job.sizes = {.hidden = hidden, .heads = heads, .seq = seq, .vocabulary = 1};
    return job;
  }
  double tokens() const { return static_cast<double>(batch * seq); }
  /// One whole activation in f16.
  double bytes() const { return 2 * tokens() * static_cast<double>(hidden); }
  Products products() const {
    const auto h = static_cast<double>(hidden);
    const auto ranks = static_cast<double>(t);
    const double square = tokens() * h * h / ranks / kRate;
    return {6 * square,
            2 * tokens() * static_cast<double>(seq + 1) * h / ranks / kRate,
            2 * square, 8 * square, 8 * square};
  }
};

const Layer kLayers[] = {{2, 1, 64, 64, 4},
                         {4, 3, 48, 96, 12},
                         {8, 4, 2048, 6144, 64},
                         {8, 1, 4096, 1024, 16}};

TEST(Layer, TakesTheTimeOfTensorParallelism) {
  for (const Layer& layer : kLayers) {
    const int t = static_cast<int>(layer.t);
    const Products x = layer.products();
    const double sum = all_reduce(t, layer.bytes());
    const double forward = x.all() + 2 * sum;
    const double backward = 2 * x.g + x.f + std::max(x.f, sum) + 2 * x.p +
                            2.5 * x.k + x.c + std::max(x.c, sum);
    HybridJob job = layer.job();
    StageRun run = run_blocks(job, 1);
    expect_time(run.forward.s, forward);
    expect_time(run.first_backward.s, backward);
    // All of forward once more, messages included
    job.layout.recompute = Recompute::kBlocks;
    run = run_blocks(job, 1);
    expect_time(run.forward.s, forward);
    expect_time(run.first_backward.s, forward + backward);
  }
}

TEST(Layer, TakesTheTimeOfSequenceParallelism) {
  for (const Layer& layer : kLayers) {
    const int t = static_cast<int>(layer.t);
    const Products x = layer.products();
    const double gather = all_gather(t, layer.bytes());
    const double scatter = reduce_scatter(t, layer.bytes());
    const double backward = 2 * gather + 2 * x.g + std::max(x.f, gather) +
                            std::max(x.f, scatter) + 2 * x.p + 2.5 * x.k +
                            std::max(x.c, gather) + std::max(x.c, scatter);
    HybridJob job = layer.job();
    job.layout.cuts_tokens = true;
    StageRun run = run_blocks(job, 1);
    expect_time(run.forward.s, x.all() + 2 * gather + 2 * scatter);
    expect_time(run.first_backward.s, backward);
    job.layout.recompute = Recompute::kAttention;
    run = run_blocks(job, 1);
    expect_time(run.forward.s, x.all() + 2 * gather + 2 * scatter);
    expect_time(run.first_backward.s, backward + x.k);
  }
}

// Korthikanti et al. 2022, section 4, without the terms for memory that this
// book does not keep: two masks of dropout, a byte each, and scores with their
// mask. Added are statistics of norms and of softmax in f32.
TEST(Layer, KeepsKorthikantisBytesWithoutMasksAndScores) {
  for (const Layer& layer : kLayers) {
    const auto t = static_cast<double>(layer.t);
    const double element = layer.bytes();  // 2 s b h
    const double norms = 4 * 4 * layer.tokens();
    const double softmax =
        4 * layer.tokens() * static_cast<double>(layer.heads) / t;
    for (const double dropout : {0.0, 0.1}) {
      // The output goes to the next stage
      const auto kept = [](const HybridJob& of) {
        return run_blocks(of, 1).kept_bytes;
      };
      HybridJob job = layer.job();
      job.layout.dropout = dropout;
      // s b h (8 + 24 / t); the paper's 10 + 24 / t has two masks
      EXPECT_EQ(kept(job), element / 2 * (8 + 24 / t) + norms + softmax);
      job.layout.recompute = Recompute::kBlocks;
      EXPECT_EQ(kept(job), element);
      job.layout.recompute = Recompute::kNothing;
      job.layout.cuts_tokens = true;
      EXPECT_EQ(kept(job), element / 2 * 32 / t + norms / t + softmax);
      // Of attention, only softmax's sums were left to drop
      job.layout.recompute = Recompute::kAttention;
      EXPECT_EQ(kept(job), element / 2 * 32 / t + norms / t);
    }
  }
}

TEST(Layer, RefusesTokensThatDoNotDivide) {
  HybridJob job = kLayers[0].job();
  job.layout.cuts_tokens = true;
  job.sizes.seq = 63;
  EXPECT_THROW(run_blocks(job, 1), Error);
}

}  // namespace
}  // namespace shardbook::planner
