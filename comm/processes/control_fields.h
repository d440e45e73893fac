#pragma once

// The fields of control messages: numbers, and lists of ranks.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "comm/processes/socket.h"

namespace shardbook::internal {

/// Throws Error unless the frame has `count` fields.
void check_fields(const Frame& frame, std::size_t count);
/// A number from 0 to `limit`. Throws Error on anything else.
std::int64_t parse_number(const std::string& text, std::int64_t limit);
/// "0,2,5" and back. Throws Error on anything else.
std::string join_ranks(const std::vector<int>& ranks);
std::vector<int> split_ranks(const std::string& text, int world_size);

}  // namespace shardbook::internal
