#pragma once

// Runs of programs with checkpoints, as a user starts them.

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "tests/cli/programs.h"

namespace shardbook {

/// A run on one of the smallest models, with checkpoints in a folder of its own.
class ResumeTest : public testing::Test {
 protected:
  /// "02_ddp" with these options, and with checkpoints.
  Outcome train(const std::string& chapter, const std::string& options) const {
    return run(chapter,
               kSmall + (" " + options) + " --checkpoint " + checkpoints());
  }
  /// The same without checkpoints.
  static Outcome plain(const std::string& chapter, const std::string& options) {
    return run(chapter, kSmall + (" " + options));
  }
  std::string checkpoints() const { return folder_ / "checkpoints"; }
  std::string path(const std::string& name) const { return folder_ / name; }
  /// The checkpoint after so many steps.
  std::string step(int steps) const {
    std::string digits = std::to_string(steps);
    digits.insert(0, 8 - digits.size(), '0');
    return checkpoints() + "/step-" + digits;
  }
  /// Names in the folder of checkpoints, without the lock.
  std::vector<std::string> names() const {
    std::vector<std::string> all;
    for (const auto& entry :
         std::filesystem::directory_iterator(checkpoints())) {
      const std::string name = entry.path().filename().string();
      if (name != ".lock") all.push_back(name);
    }
    std::sort(all.begin(), all.end());
    return all;
  }

  static std::string read(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
  }
  static void write(const std::string& path, const std::string& text) {
    std::ofstream(path, std::ios::binary) << text;
  }

  static constexpr char kSmall[] =
      "--model gpt-nano --batch 8 --seq 8 --data walk";

 private:
  TempFolder folder_;
};

inline void expect_refused(const Outcome& outcome,
                           const std::vector<std::string>& parts) {
  expect_end(outcome, 2, parts);
}

}  // namespace shardbook
