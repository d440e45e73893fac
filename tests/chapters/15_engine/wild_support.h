#pragma once

// The reader's result for a text of a config, as tests of many texts need it.

#include <fstream>
#include <iterator>
#include <string>

#include "core/check.h"
#include "tests/chapters/15_engine/choice_support.h"

namespace shardbook::engine {

/// An error, or a config with the remarks about the text.
struct Outcome {
  std::string error;    ///< empty: the text is a config
  std::string json;     ///< every key with its value
  std::string remarks;  ///< a line each
};

/// For a text that begins with '{'. The options fill "auto".
inline Outcome outcome_of(const std::string& text, int world_size = 1) {
  const Options options = options_for(world_size);
  Outcome outcome;
  try {
    const auto config = read_config(text, options, /*given=*/{});
    outcome.json = config.to_json();
    for (const std::string& remark : config.remarks) {
      outcome.remarks += remark + "\n";
    }
  } catch (const Error& error) {
    outcome.error = error.what();
  }
  return outcome;
}

inline std::string wild_folder() {
  return SHARDBOOK_ROOT "/tests/chapters/15_engine/wild/";
}

inline std::string wild_text(const std::string& name) {
  std::ifstream file(wild_folder() + name + ".json");
  SB_CHECK(file.good(), name, ": no such file");
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace shardbook::engine
