// The bytes that a rank holds equal the bill: where a rank's stages hand values
// to each other and share parameters, and where gradients are compared
// (--no-stash). The device counts; one stash, value or gradient more or less
// makes a difference.

#include <fstream>

#include "tests/chapters/06_1f1b/worlds_support.h"
#include "tests/support/temp_folder.h"

namespace shardbook::pipeline_test {
namespace {

const char* const kMlp =
    R"({"model_type": "mlp", "n_embd": 16, "vocab_size": 64,
        "n_positions": 16})";

/// `micro_batches` of two samples, the last one short; layers for three stages
/// per rank.
Options memory_options(int world_size, std::int64_t micro_batches) {
  Options options = worlds_options(world_size);
  options.model = R"({"n_embd": 16, "n_head": 2, "n_positions": 16,
                      "vocab_size": 64, "n_layer": )" +
                  std::to_string(3 * world_size) + "}";
  options.batch = 2 * micro_batches - 1;
  options.steps = 2;
  options.backend = "sim";
  return options;
}

StrategyOptions strategy_options(const std::string& schedule,
                                 std::int64_t micro_batches) {
  return {.schedule = schedule, .micro_batches = micro_batches};
}

/// With and without recomputation, and in two dtypes.
void expect_predicted(Options options, StrategyOptions setup) {
  for (const char* mode : {"never", "never, bf16", "always", "except_last"}) {
    SCOPED_TRACE(setup.schedule + ", " + std::to_string(options.world_size) +
                 " ranks, " + std::to_string(setup.chunks) +
                 " chunks, recompute " + mode);
    const std::string name = mode;
    options.dtype = name == "never, bf16" ? DType::kBF16 : DType::kF32;
    setup.recompute = name.substr(0, name.find(','));
    setup.early_recompute = name == "always";
    expect_bill(run_strategy(options, setup).report);
  }
}

class MemoryRanks : public ::testing::TestWithParam<int> {};

TEST_P(MemoryRanks, OfInterleavedSchedulesIsPredicted) {
  const int p = GetParam();
  for (const int chunks : {2, 3}) {
    for (const int m : {p, 2 * p}) {
      StrategyOptions setup = strategy_options("interleaved", m);
      setup.chunks = chunks;
      expect_predicted(memory_options(p, m), setup);
    }
  }
}

TEST_P(MemoryRanks, OfSchedulesWithOneStagePerRankIsPredicted) {
  const int p = GetParam();
  for (const char* schedule : {"gpipe", "1f1b", "zb-h1", "zb-h2", "zb-auto"}) {
    expect_predicted(memory_options(p, 2 * p),
                     strategy_options(schedule, 2 * p));
  }
}

TEST_P(MemoryRanks, WithoutStashIsPredicted) {
  const int p = GetParam();
  StrategyOptions setup = strategy_options("pipedream", 1);
  for (const bool stash : {true, false}) {
    setup.stash = stash;
    // Too few steps to be stale, just enough, and a steady state
    for (const int steps : {1, 2, p + 3, 40}) {
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        Options options = memory_options(p, 1);
        options.batch = 3;
        options.steps = steps;
        options.dtype = dtype;
        options.dropout = steps == 2 ? 0.1 : 0;
        SCOPED_TRACE(std::to_string(steps) + " steps");
        expect_bill(run_strategy(options, setup).report);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(WorldSizes, MemoryRanks,
                         ::testing::Values(1, 2, 3, 4, 8));

TEST(MemoryWorlds, OfDualPipeIsPredicted) {
  for (const int p : {2, 4, 8}) {
    for (const int m : {2 * p, 2 * p + 2}) {
      expect_predicted(memory_options(p, m), strategy_options("dualpipe", m));
    }
  }
}

// A ReLU holds the output that it passed to the next stage.
TEST(MemoryWorlds, OfAnMlpIsPredicted) {
  const auto expect_mlp = [](int p, int chunks, const std::string& schedule) {
    const int m = 2 * p;
    Options options = memory_options(p, m);
    options.model = kMlp;
    StrategyOptions setup = strategy_options(schedule, m);
    setup.chunks = chunks;
    expect_predicted(options, setup);
  };
  for (const int chunks : {2, 3, 4}) expect_mlp(1, chunks, "interleaved");
  expect_mlp(2, 2, "interleaved");
  expect_mlp(2, 0, "dualpipe");
  expect_mlp(4, 0, "dualpipe");
  StrategyOptions setup = strategy_options("pipedream", 1);
  setup.stash = false;
  for (const char* replicas :
       {"1,1", "2,1", "1,2", "2,1,1", "2,2", "1,1,1,1"}) {
    SCOPED_TRACE(replicas);
    setup.replicas = replicas;
    int ranks = 0;
    for (const char c : setup.replicas) ranks += c == ',' ? 0 : c - '0';
    Options options = memory_options(ranks, 2);
    options.model = kMlp;
    options.steps = 12;
    expect_bill(run_strategy(options, setup).report);
  }
}

// Values and gradients wait for the next stage on the same rank.
TEST(MemoryWorlds, OfAUsersOwnScheduleIsPredicted) {
  const TempFolder folder;
  const auto file_of = [&](const std::string& list) {
    const std::string file = folder / "mine.json";
    std::ofstream(file) << R"({"micro_batches": 2, "ranks": [")" + list +
                               R"("], "routes": [["0", "0.1"]],
                                  "route_of": [0, 0]})";
    return file;
  };
  Options options = memory_options(1, 2);
  StrategyOptions setup =
      strategy_options(file_of("F0 F1 F0.1 F1.1 B1.1 B0.1 B1 B0"), 2);
  expect_predicted(options, setup);
  for (const char* partition : {"1,3", "2,2", "3,1"}) {
    options.model = kMlp;
    setup.partition = partition;
    expect_predicted(options, setup);
  }
  // Backwards in two parts between stages of one rank have no formula
  setup.schedule = file_of("F0 F0.1 I0.1 I0 W0 F1 W0.1 F1.1 I1.1 W1.1 B1");
  const auto kind = static_cast<std::size_t>(MemoryKind::kActivation);
  EXPECT_LT(run_strategy(options, setup).report.ranks[0].held[kind].predicted,
            0);
}

// The --no-stash lab with backwards in two parts: the comparison leaves nothing
// for W, so the steps equal those of whole backwards.
TEST(MemoryWorlds, OfTheLabWithSplitBackwardsIsPredicted) {
  const TempFolder folder;
  const auto run = [&](const std::string& first_rank) {
    const std::string file = folder / "mine.json";
    std::ofstream(file)
        << R"({"micro_batches": 3, "micro_batches_per_step": 1, "ranks": [")" +
               first_rank + R"(", "F0 B0 U0 F1 B1 U1 F2 B2 U2"]})";
    Options options = worlds_options(2);
    options.batch = 3;
    options.steps = 3;
    StrategyOptions setup = strategy_options(file, 1);
    setup.stash = false;
    return run_strategy(options, setup).report;
  };
  const Report whole = run("F0 F1 B0 U0 F2 B1 U1 B2 U2");
  const Report split = run("F0 F1 I0 W0 U0 F2 I1 W1 U1 I2 W2 U2");
  expect_bill(whole);
  expect_bill(split);
  EXPECT_EQ(split.losses, whole.losses);
}

// With data, as on shapes.
TEST(MemoryWorlds, WithDataIsPredicted) {
  std::vector<Variant> all = {variant("interleaved", 1), variant("dualpipe", 4),
                              variant("pipedream", 4)};
  all[2].setup.stash = false;
  for (const Variant& each : all) {
    SCOPED_TRACE(each.name);
    expect_bill(
        run_strategy(worlds_options(each.world_size), each.setup).report);
  }
}

TEST(MemoryWorlds, OfNoStepsIsNone) {
  Options options = memory_options(2, 8);
  options.steps = 0;
  expect_bill(run_strategy(options, strategy_options("1f1b", 8)).report);
}

}  // namespace
}  // namespace shardbook::pipeline_test
