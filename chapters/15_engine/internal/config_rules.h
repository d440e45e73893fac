#pragma once

// Which values of a config go together.

#include <string>
#include <vector>

#include "chapters/15_engine/config.h"

namespace shardbook::engine::internal {

/// Throws Error that names all keys that take part.
void check_rules(const DeepSpeedConfig& config);
/// Where versions of DeepSpeed differ from each other or from the book.
std::vector<std::string> remarks_of(const DeepSpeedConfig& config,
                                    bool has_clipping);

}  // namespace shardbook::engine::internal
