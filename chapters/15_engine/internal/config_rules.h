#pragma once

// The file of a config, and which of its values go together.

#include <string>
#include <vector>

#include "chapters/15_engine/config.h"

namespace shardbook::engine::internal {

/// The text of a config; `option`, which named the file, begins the message of an
/// Error.
std::string read_config_file(const std::string& option,
                             const std::string& file);
/// Throws Error that names all keys that take part.
void check_rules(const DeepSpeedConfig& config);
/// Where versions of DeepSpeed differ from each other or from the book.
std::vector<std::string> remarks_of(const DeepSpeedConfig& config,
                                    bool has_clipping);

}  // namespace shardbook::engine::internal
