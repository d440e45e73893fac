#pragma once

// Files of other programs, for tests of the Llama family.

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "chapters/common/models/models.h"

namespace shardbook::common_test {

inline const std::filesystem::path kGolden =
    std::filesystem::path(SHARDBOOK_ROOT) / "tests" / "golden";

/// The folders of small models.
inline std::vector<std::string> golden_models() {
  return {"llama_gqa",          "llama_tied_llama3_rope", "llama_biases",
          "llama_eight_blocks", "qwen2_bias_tied",        "qwen3_qk_norm",
          "mixtral_top2",       "mixtral_aux_loss"};
}

inline nlohmann::json golden_json(const std::string& file) {
  std::ifstream stream(kGolden / file);
  return nlohmann::json::parse(stream);
}

inline ModelConfig golden_config(const std::string& name) {
  return ModelConfig::read((kGolden / name / "config.json").string());
}

}  // namespace shardbook::common_test
