#pragma once

// Files of other programs, for tests of the Llama family.

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "chapters/common/models/models.h"
#include "tests/support/errors.h"

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

/// A small config of a type, with further keys.
inline nlohmann::json small_config(
    const std::string& type,
    const nlohmann::json& more = nlohmann::json::object()) {
  nlohmann::json object = {{"model_type", type},
                           {"hidden_size", 64},
                           {"num_hidden_layers", 4},
                           {"num_attention_heads", 32}};
  if (!more.is_null()) object.update(more);
  return object;
}

inline ModelConfig read_config(const nlohmann::json& object) {
  return ModelConfig::from_json(object.dump(), "c.json");
}

inline std::string refusal_of_llama(const nlohmann::json& object) {
  return error_of([&] { read_config(object); });
}

}  // namespace shardbook::common_test
