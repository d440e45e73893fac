// The engine with offload to the host, against the ZeRO chapter's own run.

#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "chapters/programs/programs.h"

namespace shardbook::engine {
namespace {

/// A chapter's line for three steps of a GPT whose width is 16.
std::string line_of(const std::string& chapter, const std::string& backend,
                    const std::string& options) {
  return chapter +
         R"( --model '{"n_embd": 16, "n_layer": 2, "n_head": 4,
             "vocab_size": 31, "n_positions": 20}' --data random --steps 3
             --batch 24 --seq 16 --seed 3 --dtype f32 --deterministic
             --world-size 4 --cluster dgx-a100 --backend )" +
         backend + " " + options;
}

/// DeepSpeed's keys, where the chapter's options go by the width.
constexpr const char* kZero2 =
    R"("stage": 2, "offload_optimizer": {"device": "cpu"})";
constexpr const char* kZero3 =
    R"("stage": 3, "offload_optimizer": {"device": "cpu"},
       "offload_param": {"device": "cpu"},
       "stage3_param_persistence_threshold": 160,
       "stage3_prefetch_bucket_size": 3328, "stage3_max_reuse_distance": 0)";

TEST(EngineOffload, TakesTheTimeMemoryAndBytesOfItsChapter) {
  for (const auto& [strategy, keys] :
       {std::pair{"zero2", kZero2}, std::pair{"zero3", kZero3}}) {
    for (const char* backend : {"sim", "threads"}) {
      SCOPED_TRACE(std::string(backend) + ", " + strategy);
      const Report engine =
          run(line_of("15_engine", backend,
                      R"(--config '{"gradient_accumulation_steps": 2,
             "zero_optimization": {"overlap_comm": true, )" +
                          std::string(keys) + "}}'"));
      const Report chapter =
          run(line_of("03_zero_fsdp", backend,
                      std::string("--micro-batches 2 --cpu-offload "
                                  "--strategy ") +
                          strategy));
      EXPECT_DOUBLE_EQ(engine.time.step_s, chapter.time.step_s);
      EXPECT_GT(engine.time.step_s, 0);
      ASSERT_EQ(engine.ranks.size(), chapter.ranks.size());
      for (std::size_t rank = 0; rank < engine.ranks.size(); ++rank) {
        const RankReport& a = engine.ranks[rank];
        const RankReport& b = chapter.ranks[rank];
        EXPECT_EQ(a.bytes.counted, b.bytes.counted);
        EXPECT_EQ(a.bytes.predicted, b.bytes.predicted);
        for (std::size_t kind = 0; kind < kNumHeldKinds; ++kind) {
          EXPECT_EQ(a.held[kind].counted, b.held[kind].counted) << kind;
          EXPECT_EQ(a.held[kind].predicted, b.held[kind].predicted) << kind;
        }
      }
    }
  }
}

// Small parts of a shard return while the next are updated: more copies, and a
// different time.
TEST(EngineOffload, SubGroupsAreThoseOfTheKey) {
  const auto step_s = [](const std::string& size) {
    return run(line_of(
                   "15_engine", "sim",
                   R"(--config '{"zero_optimization": {"sub_group_size": )" +
                       size + ", " + kZero2 + "}}'"))
        .time.step_s;
  };
  EXPECT_NE(step_s("100"), step_s("1e9"));
  EXPECT_EQ(step_s("5e8"), step_s("1e9"));
}

}  // namespace
}  // namespace shardbook::engine
