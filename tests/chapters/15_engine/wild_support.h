#pragma once

// The files of wild/.

#include <fstream>
#include <iterator>
#include <string>

#include "core/check.h"
#include "tests/chapters/15_engine/choice_support.h"

namespace shardbook::engine {

inline std::string wild_folder() {
  return SHARDBOOK_ROOT "/tests/chapters/15_engine/wild/";
}

inline std::string wild_text(const std::string& name) {
  std::ifstream file(wild_folder() + name + ".json");
  SB_CHECK(file.good(), name, ": no such file");
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace shardbook::engine
