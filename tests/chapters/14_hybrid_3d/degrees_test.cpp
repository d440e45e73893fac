// Legal degrees, and the reasons for refusing the others.

#include "chapters/14_hybrid_3d/degrees.h"

#include "tests/chapters/14_hybrid_3d/hybrid_support.h"

namespace shardbook::hybrid {
namespace {

Options options_for(int world_size) { return nano_options(world_size); }

TEST(HybridDegrees, LeaveTheRestToReplicas) {
  HybridOptions setup;
  setup.tp = 2, setup.pp = 3;
  check_legal(options_for(12), setup);
  EXPECT_EQ(setup.dp, 2);
  expect_refusal(options_for(8), setup,
                 {"--world-size 8", "--dp 2", "12 ranks"});
  setup.dp = 0;
  expect_refusal(options_for(8), setup, {"--world-size 8", "multiple of 6"});
}

// Four devices: pipelines 0 -> 2 and 1 -> 3, replicas of the stages {0, 1} and
// {2, 3}.
TEST(HybridDegrees, ReplicasOfAStageAreNeighbours) {
  using Lists = std::vector<std::vector<int>>;
  HybridOptions setup;
  setup.dp = setup.pp = 2;
  for (const char* order : {"megatron", "deepspeed"}) {
    setup.order = order;
    EXPECT_EQ(topology_of(setup).groups({"pp"}), (Lists{{0, 2}, {1, 3}}));
    EXPECT_EQ(topology_of(setup).groups({"dp"}), (Lists{{0, 1}, {2, 3}}));
  }
}

TEST(HybridDegrees, ZeroBeyondStage1NeedsOneStage) {
  expect_refusal(options_for(2), {.pp = 2, .zero_stage = 2},
                 {"--zero-stage 2, --pp 2", "m times", "--zero-stage 1"});
  expect_refusal(options_for(2), {.pp = 2, .zero_stage = 3},
                 {"--zero-stage 3, --pp 2", "2m times", "--zero-stage 1"});
  EXPECT_EQ(refusal(options_for(2), {.pp = 2, .zero_stage = 1}), "");
}

TEST(HybridDegrees, AsynchronousSchedulesHaveNoPointToSumAt) {
  for (const char* schedule : {"pipedream", "pipedream-2bw"}) {
    expect_refusal(options_for(2), {.pp = 2, .schedule = schedule},
                   {schedule, "flushes", "1f1b"});
  }
}

TEST(HybridDegrees, ZeroBeyondStage1AlwaysOverlaps) {
  expect_refusal(options_for(2),
                 {.dp = 2, .zero_stage = 2, .overlap_grad_reduce = true},
                 {"--overlap-grad-reduce", "--zero-stage 2", "leave it out"});
}

TEST(HybridDegrees, NameSizesThatWork) {
  expect_refusal(options_for(3), {.tp = 3}, {"--tp 3", "4 heads", "give 2"});
  expect_refusal(options_for(2), {.dp = 2, .micro_batches = 5},
                 {"--batch 24", "2 replicas", "5 micro-batches", "give 30"});
  Options options = options_for(2);
  options.seq = 18;
  expect_refusal(options, {.cp = 2, .cp_layout = "zigzag"},
                 {"--seq 18", "4 equal parts", "give 20"});
  expect_refusal(options_for(8), {.tp = 2, .cp = 4, .cp_kind = "ulysses"},
                 {"--cp 4", "2 heads", "give 2"});
  expect_refusal(options_for(7), {.pp = 7}, {"--pp 7", "7 stages", "6 layers"});
  expect_refusal(options_for(1), {.sequence_parallel = true},
                 {"--sequence-parallel", "--tp 2"});
  expect_refusal(options_for(1), {.order = "tp-pp"},
                 {"--order tp-pp", "tp-cp-dp-pp"});
  options = options_for(1);
  options.model = "mlp";
  expect_refusal(options, {}, {"--model mlp", "GPT"});
}

// The table asks the code that refuses: every cell with "yes" is a legal run.
TEST(HybridDegrees, TheTableSaysWhatTheCodeDoes) {
  expect_text(
      combinations_text(),
      {"dp x tp x cp x pp yes yes [6] [7]   yes yes [6] [7]   [4] [4] [6] [7]",
       "dp x tp x cp      yes yes yes yes   yes yes yes [1]   [4] [4] [4] [4]",
       "dp x pp           yes yes [6] [7]   yes yes [6] [7]   yes yes [6] [7]",
       "dp                yes yes yes yes   yes yes yes [1]   yes yes [2] [3]",
       "[1] --zero-stage 3, --num-experts 8: ",
       "[2] --zero-stage 2: stages 2 and 3",
       "[4] --tp 2: this tensor parallelism", "[5] --cp 2: images",
       "[6] --zero-stage 2, --pp 2: ", "[7] --zero-stage 3, --pp 2: "});
}

// Replicas read different samples, ranks of one replica the same: together
// every row of the batch exactly once.
TEST(HybridDegrees, MicroBatchesCoverTheBatchOnce) {
  HybridOptions setup;
  setup.dp = 3, setup.micro_batches = 4;
  std::vector<int> count(24);
  for (int rank = 0; rank < 3; ++rank) {
    for (const MicroBatch& piece : pieces_of(options_for(3), setup, rank)) {
      for (std::int64_t i = 0; i < piece.rows; ++i) {
        ++count[static_cast<std::size_t>(piece.slice.first + i)];
      }
    }
  }
  EXPECT_EQ(count, std::vector<int>(24, 1));
}

}  // namespace
}  // namespace shardbook::hybrid
