#pragma once

// The file of a config, and which of its values go together.

#include <string>
#include <vector>

#include "chapters/15_engine/deepspeed_config.h"
#include "sim/json_object.h"

namespace shardbook::engine::internal {

/// The text of a config; `option`, which named the file, begins the message of an
/// Error.
std::string read_config_file(const std::string& option,
                             const std::string& file);
/// Reads the keys that act.
void read_keys(json_file::JsonObject& root, DeepSpeedConfig& config);
/// Illegal combinations: a message each, with all keys involved.
std::vector<std::string> broken_rules(const DeepSpeedConfig& config);
/// The remark on a file without gradient_clipping.
inline constexpr const char* kClippingRemark =
    "gradient_clipping is not given: 1.0, as DeepSpeed from 0.19.3 on; older "
    "versions do not clip then";
/// Where versions of DeepSpeed differ from each other or from the book.
std::vector<std::string> remarks_of(const DeepSpeedConfig& config,
                                    bool has_clipping);

}  // namespace shardbook::engine::internal
