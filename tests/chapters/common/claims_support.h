#pragma once

// Claims that whole runs of a chapter on a small GPT must meet.

#include <gtest/gtest.h>

#include <string>

#include "chapters/common/run/program.h"

namespace shardbook {

/// Three steps of a GPT with two layers, 4 heads and an odd vocabulary, in f64,
/// on a batch that 1, 2, 3, 4 and 8 ranks divide.
inline Options tiny_gpt(const std::string& chapter, int world_size) {
  Options options;
  options.chapter = chapter;
  options.world_size = world_size;
  options.model =
      R"({"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": 31,
          "n_positions": 20})";
  options.data = "random";
  options.steps = 3;
  options.batch = 24;
  options.seq = 16;
  options.seed = 3;
  options.cluster = "none";
  options.deterministic = true;
  options.dtype = DType::kF64;
  return options;
}

/// Weights equal to one device's; bytes and memory equal to the bill.
inline void expect_claims(const Report& report) {
  EXPECT_TRUE(report.parity.passed)
      << report.parity.max_rel << " beside " << report.parity.tolerance;
  ASSERT_FALSE(report.ranks.empty());
  for (std::size_t rank = 0; rank < report.ranks.size(); ++rank) {
    SCOPED_TRACE("rank " + std::to_string(rank));
    const RankReport& found = report.ranks[rank];
    EXPECT_NEAR(found.bytes.counted, found.bytes.predicted,
                1e-9 * found.bytes.counted);
    for (std::size_t kind = 0; kind < found.held.size(); ++kind) {
      // Noisy gates, and zero bubbles of images, may have no formula
      if (found.held[kind].predicted == kNotPredicted) {
        EXPECT_EQ(kind, static_cast<std::size_t>(MemoryKind::kActivation));
        continue;
      }
      if (found.held[kind].predicted < 0) continue;  // there is no claim
      EXPECT_DOUBLE_EQ(found.held[kind].counted, found.held[kind].predicted)
          << memory_kind_name(static_cast<MemoryKind>(kind));
    }
  }
}

}  // namespace shardbook
