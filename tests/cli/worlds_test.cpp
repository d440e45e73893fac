// One program in several worlds: what is counted with data equals what the world
// `sim` charges on shapes, for every chapter.

#include <gtest/gtest.h>

#include <fstream>

#include "tests/cli/programs.h"
#include "tests/support/sanitized.h"
#include "tests/support/temp_folder.h"

namespace shardbook {
namespace {

using nlohmann::json;

json report_of(const std::string& chapter, const std::string& options) {
  SCOPED_TRACE(chapter + " " + options);
  return json_of(run(
      chapter,
      "--format json --no-check --data random --steps 3 --seq 16 " + options));
}

json counted_memory(json report) {
  json memory = report["held_memory"];
  for (json& rank : report["peak_memory"]) {
    // Kernels need scratch memory where there are data, and a message waits as
    // long as its receiver is late
    for (const char* kind : {"workspace", "communication", "total"}) {
      rank.erase(kind);
    }
    for (json& peak : rank) memory.push_back(peak["counted"]);
  }
  return memory;
}

void expect_same(const std::string& chapter, int world_size,
                 const std::string& backend) {
  const std::string size = "--world-size " + std::to_string(world_size);
  const json real = report_of(chapter, size + " --backend " + backend);
  const json shapes = report_of(chapter, size + " --backend sim");
  ASSERT_TRUE(real.is_object() && shapes.is_object());
  SCOPED_TRACE(chapter + " on " + std::to_string(world_size) + " " + backend);
  EXPECT_EQ(counted_memory(real), counted_memory(shapes));
  ASSERT_EQ(real["bytes"].size(), shapes["bytes"].size());
  for (std::size_t r = 0; r < real["bytes"].size(); ++r) {
    EXPECT_EQ(real["bytes"][r]["counted"], shapes["bytes"][r]["counted"]);
  }
  const double step = real["virtual"]["step_s"]["counted"];
  EXPECT_NEAR(shapes["virtual"]["step_s"]["counted"].get<double>(), step,
              1e-9 * step);
}

TEST(ProgramWorlds, EveryChapterCountsWhatSimCharges) {
  expect_same("00_single_device", 1, "threads");
  // DDP's and ZeRO's variants are compared in tests/chapters/common
  for (const int size : world_sizes()) {
    expect_same("01_data_parallel", size, "threads");
  }
  // gpt-nano has six layers
  for (const int size : sized<int>({1, 2, 3, 4, 6}, {1, 3})) {
    expect_same("05_gpipe", size, "threads");
  }
  if (SHARDBOOK_HAVE_GLOO) expect_same("05_gpipe", 3, "gloo");
  for (const int size : {1, 4, 6}) expect_same("06_1f1b", size, "threads");
  if (SHARDBOOK_HAVE_GLOO) expect_same("06_1f1b", 3, "gloo");
}

// A program first runs on shapes, which have no loss.
TEST(ProgramWorlds, TheRunOnShapesIsSilent) {
  if (!has_terminals()) GTEST_SKIP() << "there is no pseudo-terminal here";
  for (const std::string chapter :
       {"00_single_device", "01_data_parallel", "02_ddp", "06_1f1b",
        "14_hybrid_3d", "15_engine"}) {
    const Outcome outcome =
        run_on_terminal("chapters/" + chapter + "/ch" + chapter,
                        "--data random --no-check --batch 4 --seq 8 --steps 2");
    EXPECT_EQ(outcome.status, 0) << chapter << "\n" << outcome.text;
    EXPECT_EQ(count(outcome.text, "step 1/2  loss "), 1) << outcome.text;
    EXPECT_EQ(count(outcome.text, "step 2/2  loss "), 1) << outcome.text;
    EXPECT_EQ(count(outcome.text, "0.0000"), 0) << outcome.text;
  }
  const std::string log = folder().path() + "/shapes.jsonl";
  const Outcome shapes = run_on_terminal(
      "chapters/02_ddp/ch02_ddp",
      "--backend sim --model mlp --data random --steps 2 --log " + log);
  EXPECT_EQ(count(shapes.text, "step 1/2\r"), 1) << shapes.text;
  EXPECT_EQ(count(shapes.text, "loss"), 0) << shapes.text;
  std::ifstream lines(log);
  std::string line;
  ASSERT_TRUE(std::getline(lines, line));
  const json first = json::parse(line);
  EXPECT_TRUE(first["loss"].is_null() && first["wall_s"].is_null()) << line;
  EXPECT_GT(first["virtual_s"], 0);
}

TEST(ProgramWorlds, TheEngineReportsEachStepOnce) {
  for (const std::string size : {"1", "2"}) {
    const std::string options =
        "--no-check --data random --seq 16 --steps 2 --world-size " + size +
        " --config '{\"train_batch_size\": 8, \"steps_per_print\": 1, "
        "\"wall_clock_breakdown\": true}'";
    const Outcome real = run("15_engine", options);
    EXPECT_EQ(count(real.text, "step=1, skipped=0"), 1) << real.text;
    EXPECT_EQ(count(real.text, "step=2, skipped=0"), 1) << real.text;
    EXPECT_EQ(count(real.text, "time (ms)"), 2) << real.text;
    // The steps are real, the host's milliseconds belong to no device
    const Outcome shapes = run("15_engine", options + " --backend sim");
    EXPECT_EQ(count(shapes.text, "step=1, skipped=0"), 1) << shapes.text;
    EXPECT_EQ(count(shapes.text, "time (ms)"), 0) << shapes.text;
  }
}

TEST(ProgramWorlds, ClustersThatCannotBeAreRefused) {
  for (const auto& [options, sentence] :
       std::vector<std::pair<std::string, const char*>>{
           {"--cluster dgx-a1000", "dgx-a1000"},
           {"--backend sim --cluster none", "needs a cluster"},
           {"--backend sim --world-size 3 --batch 24 --cluster kaggle-t4x2",
            "--world-size 3: --cluster kaggle-t4x2 has 2 devices"},
           {"--load /no/such/file.safetensors",
            "--load /no/such/file.safetensors: "},
           {"--backend sim --timeline /no/such/folder/t.json",
            "/no/such/folder/t.json"}}) {
    expect_refused({"02_ddp", "--data random --steps 1 " + options, sentence});
  }
}

TEST(ProgramWorlds, OutputsThatWouldBeLeftOutAreRefused) {
  for (const auto& [options, sentence] :
       std::vector<std::pair<std::string, const char*>>{
           {"--backend sim --save w.safetensors",
            "--save w.safetensors: --backend sim has shapes and no values"},
           {"--backend sim --logits l.npy", "--logits l.npy: --backend sim"},
           {"--cluster none --timeline text",
            "--timeline text: shows virtual time, and --cluster none has no"},
           {"--backend sim --timeline text --format json",
            "--timeline text: --format json prints one object"}}) {
    expect_refused({"02_ddp", "--data random --steps 1 " + options, sentence});
  }
}

TEST(ProgramWorlds, AStragglerInAClusterFileHoldsAllRanksUp) {
  const TempFolder folder;
  const std::string file = folder / "straggler.json";
  std::ofstream(file) << R"({"extends": "dgx-a100", "name": "slow",
      "faults": [{"rank": 2, "compute_slowdown": 5}]})";
  const std::string options = "--backend sim --world-size 4 --model gpt2 ";
  const auto step = [&](const std::string& cluster) {
    return report_of("02_ddp", options + "--cluster " +
                                   cluster)["virtual"]["step_s"]["counted"]
        .get<double>();
  };
  EXPECT_GT(step(file), 1.5 * step("dgx-a100"));
}

}  // namespace
}  // namespace shardbook
