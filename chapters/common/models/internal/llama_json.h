#pragma once

// The config.json of the Llama family.

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "chapters/common/models/models.h"

namespace shardbook {

/// The model_types of the family.
const std::vector<std::string>& llama_types();

/// Reads a config as transformers 5.24 does; an absent key has the default of its
/// type's class. Throws Error, which names the key: where transformers fails, and
/// where its model would compute what none here can.
ModelConfig llama_from_json(const nlohmann::json& object,
                            const std::string& label, const std::string& type);

/// A config that transformers 4.57 and 5.24 read as the same model: with all
/// keys whose defaults differ, and with rope_theta and rope_scaling, which both
/// understand.
nlohmann::json llama_to_json(const ModelConfig& config);

/// Configs by the names of --model.
const std::map<std::string, std::string>& llama_presets();

/// "rope_scaling" as files have it; null where frequencies are not changed.
nlohmann::json rope_to_json(const RopeScaling& rope);

}  // namespace shardbook
