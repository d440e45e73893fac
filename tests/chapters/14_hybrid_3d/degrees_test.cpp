// Legal degrees, and the reasons for refusing the others.

#include "chapters/14_hybrid_3d/degrees.h"

#include "tests/chapters/14_hybrid_3d/support.h"

namespace shardbook::hybrid {
namespace {

Options options_for(int world_size) { return nano_options(world_size); }

void expect_refusal(const Options& options, const HybridOptions& how,
                    const std::vector<std::string>& parts) {
  const std::string reason = refusal(options, how);
  for (const std::string& part : parts) {
    EXPECT_NE(reason.find(part), std::string::npos) << reason << "\n" << part;
  }
}

TEST(HybridDegrees, LeaveTheRestToReplicas) {
  HybridOptions how;
  how.tp = 2, how.pp = 3;
  check_legal(options_for(12), how);
  EXPECT_EQ(how.dp, 2);
  expect_refusal(options_for(8), how, {"--world-size 8", "--dp 2", "12 ranks"});
  how.dp = 0;
  expect_refusal(options_for(8), how, {"--world-size 8", "multiple of 6"});
}

// Four devices: pipelines 0 -> 2 and 1 -> 3, replicas of the stages {0, 1} and
// {2, 3}.
TEST(HybridDegrees, ReplicasOfAStageAreNeighbours) {
  using Lists = std::vector<std::vector<int>>;
  HybridOptions how;
  how.dp = how.pp = 2;
  for (const char* order : {"megatron", "deepspeed"}) {
    how.order = order;
    EXPECT_EQ(topology_of(how).groups({"pp"}), (Lists{{0, 2}, {1, 3}}));
    EXPECT_EQ(topology_of(how).groups({"dp"}), (Lists{{0, 1}, {2, 3}}));
  }
}

TEST(HybridDegrees, ZeroBeyondStage1NeedsOneStage) {
  HybridOptions how;
  how.pp = 2;
  how.zero_stage = 2;
  expect_refusal(options_for(2), how,
                 {"--zero-stage 2, --pp 2", "m times", "--zero-stage 1"});
  how.zero_stage = 3;
  expect_refusal(options_for(2), how,
                 {"--zero-stage 3, --pp 2", "2m times", "--zero-stage 1"});
  how.zero_stage = 1;
  EXPECT_EQ(refusal(options_for(2), how), "");
}

TEST(HybridDegrees, AsynchronousSchedulesHaveNoPointToSumAt) {
  for (const char* schedule : {"pipedream", "pipedream-2bw"}) {
    HybridOptions how;
    how.pp = 2;
    how.schedule = schedule;
    expect_refusal(options_for(2), how, {schedule, "flushes", "1f1b"});
  }
}

TEST(HybridDegrees, NameSizesThatWork) {
  HybridOptions how;
  how.tp = 3;
  expect_refusal(options_for(3), how, {"--tp 3", "4 heads", "give 2"});
  how = {};
  how.dp = 2, how.micro_batches = 5;
  expect_refusal(options_for(2), how,
                 {"--batch 24", "2 replicas", "5 micro-batches", "give 30"});
  how = {};
  how.cp = 2, how.cp_layout = "zigzag";
  Options options = options_for(2);
  options.seq = 18;
  expect_refusal(options, how, {"--seq 18", "4 equal parts", "give 20"});
  how = {};
  how.tp = 2, how.cp = 4, how.cp_kind = "ulysses";
  expect_refusal(options_for(8), how, {"--cp 4", "2 heads", "give 2"});
  how = {};
  how.pp = 7;
  expect_refusal(options_for(7), how, {"--pp 7", "7 stages", "6 layers"});
  how = {};
  how.sequence_parallel = true;
  expect_refusal(options_for(1), how, {"--sequence-parallel", "--tp 2"});
  how = {};
  how.order = "tp-pp";
  expect_refusal(options_for(1), how, {"--order tp-pp", "tp-cp-dp-pp"});
  options = options_for(1);
  options.model = "mlp";
  expect_refusal(options, {}, {"--model mlp", "GPT"});
}

// The table asks the code that refuses: every cell that says yes is a run.
TEST(HybridDegrees, TheTableSaysWhatTheCodeDoes) {
  const std::string table = combinations_text();
  for (const char* row :
       {"dp x tp x cp x pp yes yes [6] [7]   yes yes [6] [7]   [4] [4] [6] [7]",
        "dp x tp x cp      yes yes yes yes   yes yes yes [1]   [4] [4] [4] [4]",
        "dp x pp           yes yes [6] [7]   yes yes [6] [7]   yes yes [6] [7]",
        "dp                yes yes yes yes   yes yes yes [1]   yes yes [2] [3]",
        "[1] --zero-stage 3, --num-experts 8: ",
        "[2] --zero-stage 2: stages 2 and 3",
        "[4] --tp 2: this tensor parallelism", "[5] --cp 2: images",
        "[6] --zero-stage 2, --pp 2: ", "[7] --zero-stage 3, --pp 2: "}) {
    EXPECT_NE(table.find(row), std::string::npos) << table << row;
  }
}

// Replicas read different samples, ranks of one replica the same: together all
// rows of the batch, each once.
TEST(HybridDegrees, MicroBatchesCoverTheBatchOnce) {
  HybridOptions how;
  how.dp = 3, how.micro_batches = 4;
  std::vector<int> count(24);
  for (int rank = 0; rank < 3; ++rank) {
    for (const MicroBatch& piece : pieces_of(options_for(3), how, rank)) {
      for (std::int64_t i = 0; i < piece.rows; ++i) {
        ++count[static_cast<std::size_t>(piece.slice.first + i)];
      }
    }
  }
  EXPECT_EQ(count, std::vector<int>(24, 1));
}

}  // namespace
}  // namespace shardbook::hybrid
