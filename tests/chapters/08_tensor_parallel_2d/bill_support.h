#pragma once

// A GPT's step on the cluster `textbook`, and the claims of a run on it.

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "chapters/common/run/strategy.h"
#include "chapters/common/run/training.h"
#include "tests/chapters/common/textbook_support.h"

namespace shardbook::textbook {

/// Along a tree, whole: so does reduce.
inline double broadcast(int n, double bytes) {
  return n == 1 ? 0 : std::ceil(std::log2(n)) * message(bytes);
}

/// A GPT of two layers whose sizes divide by 2, 3 and 4 twice.
inline Options gpt_options(int ranks, std::int64_t vocabulary,
                           std::int64_t batch) {
  Options options;
  options.world_size = ranks;
  options.model = R"({"vocab_size": )" + std::to_string(vocabulary) +
                  R"(, "n_positions": 24, "n_embd": 144, "n_layer": 2,)"
                  R"( "n_head": 12})";
  options.data = "random";
  options.backend = "sim";
  options.cluster = "textbook";
  options.steps = 3;
  options.batch = batch;
  options.seq = 20;
  return options;
}

/// Trains on shapes; `make(options, world)` returns a unique_ptr to a strategy.
template <typename Make>
Report report_of(const Options& options, Make make) {
  return run_chapter(
      options, [&](const Options& as, ProcessGroup& world, Report& report) {
        const auto strategy = make(as, world);
        const TrainingLog log =
            train(as, strategy->optimizer(), false,
                  [&](std::int64_t step) { return strategy->step(step); });
        const Bill bill = strategy->bills()[0];
        finish_rank(as, world, log, bill.bytes, bill.memory, report);
      });
}

/// Bytes, and all kinds of memory that are predicted.
inline void expect_claims(const Report& report, bool has_activations) {
  ASSERT_FALSE(report.ranks.empty());
  for (const RankReport& rank : report.ranks) {
    EXPECT_NEAR(rank.bytes.predicted, rank.bytes.counted,
                1e-9 * rank.bytes.counted);
    std::vector<MemoryKind> kinds = {
        MemoryKind::kParameter, MemoryKind::kGradient,
        MemoryKind::kOptimizerState, MemoryKind::kCommunication,
        MemoryKind::kInput};
    if (has_activations) kinds.push_back(MemoryKind::kActivation);
    for (const MemoryKind kind : kinds) {
      const Claim& peak = rank.peak[static_cast<std::size_t>(kind)];
      EXPECT_EQ(peak.predicted, peak.counted) << memory_kind_name(kind);
    }
  }
}

/// Attention of b sequences with `heads` heads of `size` columns, on one rank.
inline double attention_s(double b, double heads, double size, double seq) {
  return 2 * 2 * (seq * (seq + 1) / 2) * b * heads * size / kRate;
}

}  // namespace shardbook::textbook
