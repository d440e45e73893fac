// A line that is run in this process does what its program does.

#include "chapters/programs/programs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <set>
#include <string>

#include "tests/cli/programs.h"
#include "tests/support/errors.h"

namespace shardbook {
namespace {

namespace fs = std::filesystem;

TEST(Programs, EveryChapterHasOne) {
  std::set<std::string> folders, names;
  for (const auto& entry :
       fs::directory_iterator(fs::path(SHARDBOOK_ROOT) / "chapters")) {
    const std::string name = entry.path().filename().string();
    if (std::isdigit(name[0]) != 0) folders.insert(name);
  }
  for (const NamedProgram& each : programs()) names.insert(each.name);
  EXPECT_EQ(names, folders);
  EXPECT_EQ(programs().size(), names.size());
}

/// Compares the report with that of the program itself, in its own process.
void expect_equal(const std::string& chapter, const std::string& options) {
  SCOPED_TRACE(chapter + " " + options);
  const Report here = run(chapter + " " + options);
  const auto there = json_of(run(chapter, options + " --format json"));
  ASSERT_TRUE(there.is_object());
  EXPECT_EQ(there["chapter"], here.chapter);
  EXPECT_EQ(here.time.step_s, there["virtual"]["step_s"]["counted"]);
  ASSERT_EQ(here.ranks.size(), there["bytes"].size());
  for (std::size_t i = 0; i < here.ranks.size(); ++i) {
    EXPECT_EQ(here.ranks[i].bytes.counted, there["bytes"][i]["counted"]);
  }
  const auto parity = there["parity"];
  EXPECT_EQ(here.parity.max_abs, parity["max_abs"]);
  EXPECT_EQ(here.parity.passed, parity["passed"]);
  for (const auto& [key, value] : here.more) EXPECT_TRUE(there.contains(key));
}

TEST(Programs, ALineIsWhatItsProgramDoes) {
  const std::string shapes = "--backend sim --steps 1 --batch 32 --world-size ";
  expect_equal("00_single_device", "--backend sim --steps 1");
  expect_equal("04_model_parallel",
               "--steps 1 --batch 4 --image-size 32 --backend sim");
  for (const char* chapter :
       {"01_data_parallel", "02_ddp", "03_zero_fsdp", "05_gpipe", "06_1f1b",
        "07_tensor_parallel", "08_tensor_parallel_2d", "11_dtensor",
        "12_sequence_parallel", "13_moe", "14_hybrid_3d", "15_engine"}) {
    expect_equal(chapter, shapes + "4");
  }
  expect_equal("09_tensor_parallel_2p5d", shapes + "8");
  expect_equal("10_tensor_parallel_3d", shapes + "8");
  expect_equal("06_1f1b",
               "--world-size 2 --schedule pipedream --steps 3 --batch 8 "
               "--data walk --seq 16 --dtype f64");
  expect_equal("15_engine",
               "--world-size 2 --steps 2 --seq 16 --dtype f64 --config "
               "'{\"train_batch_size\": 4, "
               "\"zero_optimization\": {\"stage\": 2}}'");
}

/// The message of the error.
std::string refusal(const std::string& line) {
  return error_of([&] { run(line); });
}

TEST(Programs, RefusesLinesThatItCannotRun) {
  EXPECT_NE(refusal("02_dpp --steps 1").find("'02_dpp': no such chapter"),
            std::string::npos);
  EXPECT_NE(refusal("").find("no such chapter"), std::string::npos);
  EXPECT_NE(refusal("02_ddp --backend gloo").find("--backend gloo: here"),
            std::string::npos);
  EXPECT_NE(refusal("05_gpipe --print-schedule").find("trains nothing"),
            std::string::npos);
  for (const char* flag : {"--help", "--format json", "--timeline text"}) {
    EXPECT_NE(refusal(std::string("02_ddp ") + flag).find("here, "),
              std::string::npos)
        << flag;
  }
  EXPECT_NE(refusal("02_ddp --data 'book").find("a quote is not closed"),
            std::string::npos);
  EXPECT_NE(refusal("02_ddp --stpes 1").find("did you mean --steps?"),
            std::string::npos);
  EXPECT_NE(refusal("08_tensor_parallel_2d --world-size 3").find("3"),
            std::string::npos);
}

}  // namespace
}  // namespace shardbook
