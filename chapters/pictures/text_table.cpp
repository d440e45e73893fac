#include "chapters/pictures/text_table.h"

#include <algorithm>

namespace shardbook::pictures::text_table {

// Continuation bytes of UTF-8 take no column.
std::size_t width(const std::string& text) {
  return static_cast<std::size_t>(
      std::count_if(text.begin(), text.end(),
                    [](unsigned char c) { return (c & 0xC0) != 0x80; }));
}

std::string align(const std::vector<Row>& rows) {
  if (rows.empty()) return "";
  std::vector<std::size_t> widths(rows.front().size(), 0);
  for (const Row& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) {
      widths[i] = std::max(widths[i], width(row[i]));
    }
  }
  std::string text;
  for (const Row& row : rows) {
    std::string line;
    for (std::size_t i = 0; i < row.size(); ++i) {
      line += row[i] + std::string(widths[i] - width(row[i]) + 2, ' ');
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

}  // namespace shardbook::pictures::text_table
