#pragma once

// Whole runs of chapters: training, the run on one device, the report's claims.

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "chapters/common/run/program.h"
#include "comm/device_mesh.h"

namespace shardbook::sharded_test {

/// A small GPT whose sizes divide by 2, 3, 4 and 8.
inline Options small_gpt(int world_size, DType dtype = DType::kF64) {
  Options options;
  options.chapter = "test";
  options.model = R"({"model_type":"gpt2","vocab_size":96,"n_positions":16,)"
                  R"("n_embd":48,"n_layer":2,"n_head":24})";
  options.data = "walk";
  options.world_size = world_size;
  options.dtype = dtype;
  options.batch = 8;
  options.seq = 6;
  options.steps = 3;
  options.cluster = "none";
  options.deterministic = true;
  return options;
}

/// Trains by `StrategyType(options, setup, group)` on the whole world, and
/// compares with one device: with `reference`, or with as many pieces.
template <typename StrategyType, typename Setup>
Report report_of(
    const Options& options, const Setup& setup,
    const std::function<ReferenceRun(const Options&)>& reference = {}) {
  ChapterRun chapter;
  chapter.rank = [&](const Options& options, ProcessGroup& world, Run& run) {
    StrategyType strategy(options, setup, world);
    run.train(options, strategy);
  };
  chapter.reference = [&](const Options& options) {
    return reference ? reference(options)
                     : train_one_device(options, setup.micro_batches);
  };
  return run_and_compare(options, chapter);
}

/// The peak of activations over all ranks, in bytes.
inline double activation_peak(const RankReport& rank) {
  return rank.peak[static_cast<std::size_t>(MemoryKind::kActivation)].counted;
}

/// Bytes and memory are as predicted, on every rank.
inline void expect_bill(const Report& report) {
  ASSERT_FALSE(report.ranks.empty());
  for (const RankReport& rank : report.ranks) {
    EXPECT_NEAR(rank.bytes.predicted, rank.bytes.counted,
                1e-9 * rank.bytes.counted);
    for (std::size_t kind = 0; kind < rank.held.size(); ++kind) {
      EXPECT_EQ(rank.held[kind].predicted, rank.held[kind].counted)
          << memory_kind_name(static_cast<MemoryKind>(kind)) << " on "
          << rank.device;
    }
  }
}

/// Every claim has a prediction and holds, on every rank.
inline void expect_claims(const Report& report, const std::string& name) {
  SCOPED_TRACE(name);
  EXPECT_TRUE(report.parity.checked);
  EXPECT_TRUE(report.parity.passed)
      << report.parity.max_rel << " beside " << report.parity.tolerance;
  expect_bill(report);
}

}  // namespace shardbook::sharded_test
