// The engine with offload to the host, against the ZeRO chapter's own run.

#include <gtest/gtest.h>

#include "chapters/03_zero_fsdp/zero_fsdp_strategy.h"
#include "tests/chapters/15_engine/choice_support.h"
#include "tests/chapters/common/claims_support.h"
#include "tests/chapters/common/sharded_support.h"

namespace shardbook::engine {
namespace {

Options options_on(const std::string& backend) {
  Options options = tiny_gpt("15_engine", 4);
  options.backend = backend;
  options.cluster = "dgx-a100";
  options.dtype = DType::kF32;
  return options;
}

Report engine_run(const Options& options, int stage) {
  const std::string cpu = R"({"device": "cpu"})";
  // The chapter uses the width h = 16 unless a key is given
  const std::string third =
      stage == 3 ? R"(, "stage3_param_persistence_threshold": 160,
                       "stage3_prefetch_bucket_size": 3328,
                       "stage3_max_reuse_distance": 0, "offload_param": )" +
                       cpu
                 : std::string();
  return train_config(
      options, R"({"train_batch_size": 24, "gradient_accumulation_steps": 2,
          "zero_optimization": {"overlap_comm": true, "stage": )" +
                   std::to_string(stage) + R"(, "offload_optimizer": )" + cpu +
                   third + "}}");
}

Report chapter_run(const Options& options, int stage) {
  zero_fsdp::StrategyOptions setup;
  setup.strategy = "zero" + std::to_string(stage);
  setup.micro_batches = 2;
  setup.cpu_offload = true;
  return sharded_test::report_of<zero_fsdp::ZeroFsdpStrategy>(options, setup);
}

TEST(EngineOffload, TakesTheTimeMemoryAndBytesOfItsChapter) {
  for (const int stage : {2, 3}) {
    for (const char* backend : {"sim", "threads"}) {
      SCOPED_TRACE(std::string(backend) + ", stage " + std::to_string(stage));
      const Options options = options_on(backend);
      const Report engine = engine_run(options, stage);
      const Report chapter = chapter_run(options, stage);
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
    return train_config(
               options_on("sim"),
               R"({"train_batch_size": 24, "zero_optimization": {"stage": 2,
            "offload_optimizer": {"device": "cpu"}, "sub_group_size": )" +
                   size + "}}")
        .time.step_s;
  };
  EXPECT_NE(step_s("100"), step_s("1e9"));
  EXPECT_EQ(step_s("5e8"), step_s("1e9"));
}

}  // namespace
}  // namespace shardbook::engine
