// A strategy in one file (chapters/your_own/local_sgd.cpp) gets all worlds,
// claims and reports from the shell.

#include <gtest/gtest.h>

#include <fstream>

#include "tests/cli/programs.h"

namespace shardbook {
namespace {

using nlohmann::json;

Outcome local_sgd(const std::string& options) {
  return run_program("tests/cli/local_sgd",
                     "--data random --seq 16 --batch 12 --steps 6 " + options);
}

/// The report of a run that ends well.
json report_of(const std::string& options) {
  return json_of(local_sgd("--format json " + options));
}

TEST(LocalSgd, IsAChapterOnThreads) {
  for (const int ranks : {1, 2, 3, 4}) {
    const json report = report_of("--world-size " + std::to_string(ranks));
    expect_claims(report);
    EXPECT_EQ(report["claims"]["time"], "no closed form");
    EXPECT_EQ(report["bytes"].size(), static_cast<std::size_t>(ranks));
  }
}

TEST(LocalSgd, IsAChapterOnProcesses) {
  if (!SHARDBOOK_HAVE_GLOO) GTEST_SKIP() << "this build has no Gloo";
  expect_claims(report_of("--world-size 2 --backend gloo"));
}

TEST(LocalSgd, IsAChapterInTheSimulatedCluster) {
  const json report = report_of("--world-size 4 --backend sim --model gpt2");
  EXPECT_EQ(report["claims"]["bytes"], "passed");
  EXPECT_GT(report["virtual"]["step_s"], 0);
}

// The claim is about the last step, with an average and without one.
TEST(LocalSgd, HasAClosedFormOnTextbook) {
  for (const char* steps : {"6", "7"}) {
    const json report = report_of(
        "--world-size 4 --backend sim --cluster textbook --model gpt2 "
        "--steps " +
        std::string(steps));
    EXPECT_EQ(report["claims"]["time"], "passed") << steps;
  }
}

// Each replica has its own batch norms, as the oracle has.
TEST(LocalSgd, TrainsImages) {
  expect_claims(json_of(run_program(
      "tests/cli/local_sgd",
      "--model resnet18 --image-size 32 --batch 4 --steps 3 --world-size 2 "
      "--format json")));
}

TEST(LocalSgd, AveragesLessOftenForFewerBytes) {
  const auto bytes = [](const std::string& every) {
    return report_of("--world-size 2 --average-every " +
                     every)["bytes"][0]["counted"]
        .get<double>();
  };
  const double losses = 6 * 8;
  EXPECT_EQ(bytes("2") - losses, 3 * (bytes("6") - losses));
}

TEST(LocalSgd, PrintsAReportSavesAndRefuses) {
  const std::string file = folder() / "local_sgd.safetensors";
  expect_done(local_sgd("--world-size 2 --save '" + file + "'"), {"numbers"});
  EXPECT_TRUE(std::ifstream(file).good());
  expect_end(local_sgd("--average-every 0"), 2, {"--average-every 0"});
  expect_end(local_sgd("--world-size 5"), 2, {"--batch 12", "--world-size 5"});
}

}  // namespace
}  // namespace shardbook
