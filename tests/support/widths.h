#pragma once

#include <gtest/gtest.h>

#include <sstream>
#include <string>

#include "chapters/pictures/text_table.h"

namespace shardbook {

/// Every line fits a terminal of 80 columns, except commands to copy. Returns
/// the number of lines.
inline int expect_fits_terminal(const std::string& text) {
  int count = 0;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line); ++count) {
    if (line.rfind("  ./shardbook ", 0) == 0) continue;
    EXPECT_LE(pictures::text_table::width(line), pictures::text_table::kColumns)
        << line;
  }
  return count;
}

}  // namespace shardbook
