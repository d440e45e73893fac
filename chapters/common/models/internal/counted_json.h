#pragma once

// The parts of a decoder that the book does not train, by its config.json.

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "chapters/common/models/counted_model.h"

namespace shardbook {

/// `type` is one of counted_families::types(). Throws Error that begins with
/// `label`.
CountedModel counted_from_json(const nlohmann::json& object,
                               const std::string& label,
                               const std::string& type);

}  // namespace shardbook
