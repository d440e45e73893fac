#include "comm/processes/control_fields.h"

#include <algorithm>

#include "core/check.h"

namespace shardbook::internal {

void check_fields(const Frame& frame, std::size_t count) {
  SB_CHECK(frame.fields.size() == count, "control message of kind ",
           int(frame.kind), " has ", frame.fields.size(), " fields, not ",
           count);
}

std::int64_t parse_number(const std::string& text, std::int64_t limit) {
  SB_CHECK(!text.empty() && text.size() <= 18 &&
               text.find_first_not_of("0123456789") == std::string::npos,
           "control message: \"", text, "\" is no number");
  const std::int64_t value = std::stoll(text);
  SB_CHECK(value <= limit, "control message: ", value, " exceeds ", limit);
  return value;
}

std::string join_ranks(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) {
    if (!text.empty()) text += ',';
    text += std::to_string(rank);
  }
  return text;
}

std::vector<int> split_ranks(const std::string& text, int world_size) {
  std::vector<int> ranks;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    ranks.push_back(static_cast<int>(
        parse_number(text.substr(begin, end - begin), world_size - 1)));
    begin = end + 1;
  }
  return ranks;
}

}  // namespace shardbook::internal
