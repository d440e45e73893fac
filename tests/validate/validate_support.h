#pragma once

// Tables made up for one test.

#include <fstream>
#include <string>

#include "tests/support/temp_folder.h"

namespace shardbook::test {

inline std::string own_table(const std::string& name) {
  return std::string(SHARDBOOK_ROOT) + "/bench/validate/" + name;
}

/// A file with this text, in a folder of this program's own.
inline std::string written(const std::string& text,
                           const std::string& name = "table.csv") {
  static const TempFolder folder;
  const std::string file = folder / name;
  std::ofstream(file, std::ios::binary) << text;
  return file;
}

}  // namespace shardbook::test
