// A layer and an attention, run alone: their time on the cluster `textbook`
// and what they keep, against closed forms.

#include "bench/validate/pieces.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "core/check.h"
#include "tests/chapters/common/textbook_support.h"

namespace shardbook::validate {
namespace {

using sequence_parallel::Layout;
using textbook::all_gather;
using textbook::all_reduce;
using textbook::expect_time;
using textbook::kRate;
using textbook::message;
using textbook::reduce_scatter;

/// Forward products of a layer over t ranks: of queries, keys and values (c),
/// attention (k), its output (p), and the MLP (f, g).
struct Products {
  double c, k, p, f, g;
  double all() const { return c + k + p + f + g; }
};

struct Layer {
  std::int64_t t, batch, seq, hidden, heads;

  LayerJob job() const {
    LayerJob job;
    job.cluster = sim::Cluster::read("textbook");
    job.ranks = static_cast<int>(t);
    job.micro_batch = batch;
    job.seq = seq;
    job.hidden = hidden;
    job.heads = heads;
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

TEST(ValidateLayer, TakesTheTimeOfTensorParallelism) {
  for (const Layer& layer : kLayers) {
    const int t = static_cast<int>(layer.t);
    const Products x = layer.products();
    const double sum = all_reduce(t, layer.bytes());
    const double forward = x.all() + 2 * sum;
    const double backward = 2 * x.g + x.f + std::max(x.f, sum) + 2 * x.p +
                            2.5 * x.k + x.c + std::max(x.c, sum);
    LayerJob job = layer.job();
    LayerRun run = run_layer(job);
    expect_time(run.forward_s, forward);
    expect_time(run.backward_s, backward);
    // All of forward once more, messages included
    job.recompute = true;
    run = run_layer(job);
    expect_time(run.forward_s, forward);
    expect_time(run.backward_s, forward + backward);
  }
}

TEST(ValidateLayer, TakesTheTimeOfSequenceParallelism) {
  for (const Layer& layer : kLayers) {
    const int t = static_cast<int>(layer.t);
    const Products x = layer.products();
    const double gather = all_gather(t, layer.bytes());
    const double scatter = reduce_scatter(t, layer.bytes());
    const double backward = 2 * gather + 2 * x.g + std::max(x.f, gather) +
                            std::max(x.f, scatter) + 2 * x.p + 2.5 * x.k +
                            std::max(x.c, gather) + std::max(x.c, scatter);
    LayerJob job = layer.job();
    job.cuts_tokens = true;
    LayerRun run = run_layer(job);
    expect_time(run.forward_s, x.all() + 2 * gather + 2 * scatter);
    expect_time(run.backward_s, backward);
    job.recompute_attention = true;
    run = run_layer(job);
    expect_time(run.forward_s, x.all() + 2 * gather + 2 * scatter);
    expect_time(run.backward_s, backward + x.k);
  }
}

// Korthikanti et al. 2022, section 4, without what this book does not keep:
// two masks of dropout, a byte each, and scores with their mask. Beside it,
// statistics of norms and of softmax in f32.
TEST(ValidateLayer, KeepsKorthikantisBytesWithoutMasksAndScores) {
  for (const Layer& layer : kLayers) {
    const auto t = static_cast<double>(layer.t);
    const double element = layer.bytes();  // 2 s b h
    const double norms = 4 * 4 * layer.tokens();
    const double softmax =
        4 * layer.tokens() * static_cast<double>(layer.heads) / t;
    for (const double dropout : {0.0, 0.1}) {
      LayerJob job = layer.job();
      job.dropout = dropout;
      // s b h (8 + 24 / t); the paper's 10 + 24 / t has two masks
      EXPECT_EQ(run_layer(job).kept_bytes,
                element / 2 * (8 + 24 / t) + norms + softmax);
      job.recompute = true;
      EXPECT_EQ(run_layer(job).kept_bytes, element);
      job.recompute = false;
      job.cuts_tokens = true;
      EXPECT_EQ(run_layer(job).kept_bytes,
                element / 2 * 32 / t + norms / t + softmax);
      // Of attention there was no more to drop than softmax's sums
      job.recompute_attention = true;
      EXPECT_EQ(run_layer(job).kept_bytes, element / 2 * 32 / t + norms / t);
    }
  }
}

TEST(ValidateLayer, RefusesWhatNoChapterRuns) {
  LayerJob job = kLayers[0].job();
  job.recompute_attention = true;
  EXPECT_THROW(run_layer(job), Error);
  job.cuts_tokens = true;
  job.seq = 63;
  EXPECT_THROW(run_layer(job), Error);
}

// The sequence chapter's closed form of zigzag: a first step with its causal
// mask, then steps of equal work, behind which the hops hide.
TEST(ValidateAttention, TakesTheTimeOfARing) {
  for (const int c : {2, 4, 8}) {
    for (const std::int64_t tokens : {16, 4096}) {
      AttentionJob job;
      job.cluster = sim::Cluster::read("textbook");
      job.ranks = c;
      job.tokens_per_rank = tokens;
      job.heads = job.kv_heads = 4;
      job.head_dim = 16;
      job.dtype = DType::kF32;
      job.layout = Layout::kZigzag;
      const double half = static_cast<double>(tokens) / 2;
      const double own = 2 * (2 * half * half + half) * 64 / kRate;
      const double other = 2 * 2 * half * half * 64 / kRate;
      const double hop = 2 * message(4 * 64 * static_cast<double>(tokens));
      const double forward = std::max(2 * own, hop) +
                             (c - 2) * std::max(2 * other, hop) + 2 * other;
      expect_time(run_attention(job).seconds, forward);
      job.with_backward = true;
      expect_time(run_attention(job).seconds,
                  forward + std::max(5 * own, hop) +
                      (c - 2) * std::max(5 * other, 2 * hop) +
                      std::max(5 * other, hop) + hop);
    }
  }
}

// The last rank of contiguous slices works in every step: nearly twice as long.
TEST(ValidateAttention, LastsAsLongAsItsLastRank) {
  AttentionJob job;
  job.cluster = sim::Cluster::read("textbook");
  job.ranks = 8;
  job.tokens_per_rank = 4096;
  job.heads = job.kv_heads = 4;
  job.head_dim = 128;
  const double n = 4096;
  const double last = 2 * (n * (n + 1) / 2 + 7 * n * n) * 2 * 512 / kRate;
  expect_time(run_attention(job).seconds, last);
}

}  // namespace
}  // namespace shardbook::validate
