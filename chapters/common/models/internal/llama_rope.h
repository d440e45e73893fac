#pragma once

// Rotary positions in a config.json.

#include <nlohmann/json.hpp>
#include <string>

#include "chapters/common/models/models.h"

namespace shardbook {

/// Reads the base of the frequencies and their scaling in any of three spellings:
///
///   {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2}}
///   {"rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", ...}}
///   {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, ...}}
///
/// A rope_theta inside counts more than one outside, which counts more than
/// `theta`. Needs the number of positions in `config`. Throws Error where
/// transformers fails, for another kind of scaling, and for a file whose two
/// spellings differ.
void read_rope(const nlohmann::json& object, const std::string& label,
               double theta, ModelConfig& config);

}  // namespace shardbook
