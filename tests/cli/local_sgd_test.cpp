// A chapter in one file (tests/example/local_sgd.cpp) gets all worlds, claims
// and reports from the shell.

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/cli/programs.h"

namespace shardbook {
namespace {

using nlohmann::json;

Outcome local_sgd(const std::string& options) {
  return run_program("tests/cli/local_sgd",
                     "--data random --seq 16 --batch 12 --steps 6 " + options);
}

void expect_claims(const Outcome& outcome, const std::string& numbers) {
  ASSERT_EQ(outcome.status, 0) << outcome.text;
  const json report = json::parse(outcome.text, nullptr, false);
  EXPECT_EQ(report["claims"]["numbers"], numbers) << outcome.text;
  for (const char* claim : {"bytes", "memory"}) {
    EXPECT_EQ(report["claims"][claim], "passed") << claim << outcome.text;
  }
}

TEST(LocalSgd, IsAChapterOnThreads) {
  for (const int ranks : {1, 2, 3, 4}) {
    const Outcome outcome =
        local_sgd("--format json --world-size " + std::to_string(ranks));
    expect_claims(outcome, "passed");
    const json report = json::parse(outcome.text, nullptr, false);
    EXPECT_EQ(report["claims"]["time"], "no closed form");
    EXPECT_EQ(report["bytes"].size(), static_cast<std::size_t>(ranks));
  }
}

TEST(LocalSgd, IsAChapterOnProcesses) {
#if SHARDBOOK_HAVE_GLOO
  expect_claims(local_sgd("--format json --world-size 2 --backend gloo"),
                "passed");
#else
  GTEST_SKIP() << "this build has no Gloo";
#endif
}

TEST(LocalSgd, IsAChapterInTheSimulatedCluster) {
  const Outcome outcome =
      local_sgd("--format json --world-size 4 --backend sim --model gpt2");
  ASSERT_EQ(outcome.status, 0) << outcome.text;
  const json report = json::parse(outcome.text, nullptr, false);
  EXPECT_EQ(report["claims"]["bytes"], "passed");
  EXPECT_GT(report["virtual"]["step_s"], 0);
}

TEST(LocalSgd, AveragesLessOftenForFewerBytes) {
  const auto bytes = [](const std::string& every) {
    const Outcome outcome =
        local_sgd("--format json --world-size 2 --average-every " + every);
    return json::parse(outcome.text, nullptr, false)["bytes"][0]["counted"]
        .get<double>();
  };
  const double losses = 6 * 8;
  EXPECT_EQ(bytes("2") - losses, 3 * (bytes("6") - losses));
}

TEST(LocalSgd, PrintsAReportSavesAndRefuses) {
  const std::string file = folder() / "local_sgd.safetensors";
  const Outcome good = local_sgd("--world-size 2 --save '" + file + "'");
  EXPECT_EQ(good.status, 0) << good.text;
  EXPECT_NE(good.text.find("numbers"), std::string::npos) << good.text;
  EXPECT_TRUE(std::ifstream(file).good());
  const Outcome bad = local_sgd("--average-every 0");
  EXPECT_EQ(bad.status, 2);
  EXPECT_NE(bad.text.find("--average-every 0"), std::string::npos) << bad.text;
}

}  // namespace
}  // namespace shardbook
