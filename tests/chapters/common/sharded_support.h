#pragma once

// Whole runs of chapters whose trainers are ShardedTrainers: the claims of the
// report, and checkpoints that move between chapters.

#include <gtest/gtest.h>

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

/// Trains by `Trainer(options, how, group)` on the whole world, and compares
/// with one device.
template <typename Trainer, typename How>
Report report_of(const Options& options, const How& how) {
  ChapterRun chapter;
  chapter.rank = [&](const Options& as, ProcessGroup& world, Run& run) {
    Trainer strategy(as, how, world);
    run.train(as, strategy);
  };
  chapter.reference = [&](const Options& as) {
    return train_one_device(as, how.micro_batches);
  };
  return run_and_compare(options, chapter);
}

/// Every claim has a prediction and holds, on every rank.
inline void expect_claims(const Report& report, const std::string& name) {
  SCOPED_TRACE(name);
  EXPECT_TRUE(report.parity.checked);
  EXPECT_TRUE(report.parity.passed)
      << report.parity.max_rel << " beside " << report.parity.tolerance;
  for (const RankReport& rank : report.ranks) {
    EXPECT_NEAR(rank.bytes.predicted, rank.bytes.counted,
                1e-9 * rank.bytes.counted);
    for (int k = 0; k < kNumMemoryKinds; ++k) {
      const auto kind = static_cast<MemoryKind>(k);
      if (kind == MemoryKind::kWorkspace) continue;
      const Claim& claim = rank.peak[static_cast<std::size_t>(k)];
      EXPECT_EQ(claim.predicted, claim.counted)
          << memory_kind_name(kind) << " on " << rank.device;
    }
  }
}

}  // namespace shardbook::sharded_test
