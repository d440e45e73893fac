// An attention, run alone: its time on the cluster `textbook`, against closed
// forms.

#include "bench/validate/jobs.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/chapters/common/textbook_support.h"

namespace shardbook::validate {
namespace {

using sequence_parallel::Layout;
using textbook::expect_time;
using textbook::kRate;
using textbook::message;

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
