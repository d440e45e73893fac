#pragma once

// Tables made up for one test.

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace shardbook::test {

inline std::string own_table(const std::string& name) {
  return std::string(SHARDBOOK_ROOT) + "/bench/validate/" + name;
}

/// A file with this text, named after the running test.
inline std::string written(const std::string& text,
                           const std::string& name = "table.csv") {
  const auto* test = testing::UnitTest::GetInstance()->current_test_info();
  const std::filesystem::path folder =
      std::filesystem::path(testing::TempDir()) /
      (std::string("validate.") + test->test_suite_name() + "." + test->name());
  std::filesystem::create_directories(folder);
  const std::string file = (folder / name).string();
  std::ofstream(file, std::ios::binary) << text;
  return file;
}

}  // namespace shardbook::test
