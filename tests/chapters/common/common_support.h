#pragma once

// Files, errors and a tiny model for the tests of what all chapters share.

#include <gtest/gtest.h>

#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "chapters/common/models/models.h"
#include "core/check.h"
#include "core/safetensors.h"
#include "tests/support/errors.h"
#include "tests/support/temp_folder.h"

namespace shardbook::common_test {

/// A folder for each test, removed afterwards.
class CommonFiles : public testing::Test {
 protected:
  std::string path(const std::string& name) const { return folder_ / name; }
  std::string write(const std::string& name, const std::string& bytes) const {
    std::ofstream(path(name), std::ios::binary) << bytes;
    return path(name);
  }

 private:
  TempFolder folder_;
};

/// The config that a saved model carries.
inline std::string config_in(const std::string& path) {
  const std::string text = CheckpointReader::open(path).metadata().at("config");
  return ModelConfig::from_json(text, path).to_json();
}

inline ModelConfig tiny() {
  ModelConfig config;
  config.vocab_size = 11;
  config.n_positions = 6;
  config.n_embd = 8;
  config.n_layer = 2;
  config.n_head = 2;
  return config;
}

/// The text of a GPT's config: sizes, then `rest`.
inline std::string with_sizes(const std::string& rest) {
  return R"({"n_embd": 8, "n_layer": 2, "n_head": 2, )" + rest + "}";
}

inline InitOptions f64_init(std::uint64_t seed = 0) {
  InitOptions init;
  init.seed = seed;
  init.dtype = DType::kF64;
  return init;
}

}  // namespace shardbook::common_test
