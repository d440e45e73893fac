// Disks that are full, and limits on sizes of files.

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "tests/cli/programs.h"
#include "tests/support/errors.h"

namespace shardbook {
namespace {

TEST(FullDisk, LeavesTheOldCheckpoint) {
  const std::string path = folder() / "old.safetensors";
  std::ofstream(path) << "old";
  // The shell's limit on file sizes stands for the full disk.
  const std::string limited =
      "sh -c 'ulimit -f 8; exec \"$0\" \"$@\"' "
      "'" SHARDBOOK_BUILD
      "/chapters/00_single_device/ch00_single_device' "
      "--steps 0 --no-check --save " +
      path + " 2>&1";
  const Outcome outcome = run_command(limited);
  EXPECT_EQ(outcome.status, 3) << outcome.text;
  expect_text(outcome.text, {"File too large"});
  std::ifstream file(path);
  std::string text;
  file >> text;
  EXPECT_EQ(text, "old");
}

TEST(FullDisk, BelowAFileOfTheRunIsNamed) {
  for (const std::string option :
       {"--log", "--report", "--trace", "--timeline"}) {
    const Outcome outcome =
        run("00_single_device",
            "--steps 1 --seq 8 --batch 2 --no-check " + option + " /dev/full");
    expect_end(outcome, 3,
               {"/dev/full: ", "cannot be written: No space left on device"});
  }
  // A schedule is written before the training begins
  const std::string link = folder() / "full.json";
  std::filesystem::create_symlink("/dev/full", link);
  expect_end(
      run("06_1f1b", "--backend sim --world-size 2 --write-schedule " + link),
      3, {"--write-schedule " + link, "No space left on device"});
}

TEST(FullDisk, BelowTheReportIsNoSuccess) {
  for (const char* options :
       {"--steps 1 --seq 8 --batch 2 >/dev/full", "--help >/dev/full",
        "--steps 1 --seq 8 --batch 2 --format json >/dev/full"}) {
    EXPECT_EQ(run("00_single_device", options).status, 3) << options;
  }
}

}  // namespace
}  // namespace shardbook
