#include "chapters/pictures/text_table.h"

#include <algorithm>
#include <cctype>
#include <numeric>

namespace shardbook::pictures::text_table {
namespace {

// A byte that continues a character of UTF-8.
bool is_continuation(char c) { return (c & 0xC0) == 0x80; }

void shorten(std::string& text, std::size_t columns) {
  if (width(text) <= columns) return;
  while (width(text) + 2 > columns) {
    while (is_continuation(text.back())) text.pop_back();
    text.pop_back();
  }
  text += "..";
}

}  // namespace

std::size_t width(const std::string& text) {
  std::size_t columns = 0;
  bool in_colour = false;  // from an escape to its m
  for (const char c : text) {
    in_colour = in_colour || c == '\033';
    // From U+3000 on
    const bool is_wide = static_cast<unsigned char>(c) >= 0xE3;
    if (!in_colour && !is_continuation(c)) columns += is_wide ? 2 : 1;
    in_colour = in_colour && c != 'm';
  }
  return columns;
}

std::string align(std::vector<Row> rows, std::size_t columns) {
  if (rows.empty() || rows.front().empty()) return "";
  std::vector<std::size_t> widths(rows.front().size(), 0);
  for (const Row& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) {
      widths[i] = std::max(widths[i], width(row[i]));
    }
  }
  const std::size_t others = std::accumulate(widths.begin() + 1, widths.end(),
                                             2 * (widths.size() - 1));
  constexpr std::size_t kLeast = 8;  // of the first column
  widths[0] = std::min(widths[0], std::max(columns, others + kLeast) - others);
  std::string text;
  for (Row& row : rows) {
    shorten(row[0], widths[0]);
    std::string line;
    for (std::size_t i = 0; i < row.size(); ++i) {
      line += row[i] + std::string(widths[i] - width(row[i]) + 2, ' ');
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

std::string wrap(std::string text, std::size_t indent, std::size_t columns) {
  std::string lines;
  while (width(text) > columns) {
    std::size_t end = 0;  // the last space that fits
    for (std::size_t i = text.find(' ', text.find_first_not_of(' '));
         i != std::string::npos && width(text.substr(0, i)) <= columns;
         i = text.find(' ', i + 1)) {
      if (!std::isdigit(static_cast<unsigned char>(text[i - 1]))) end = i;
    }
    if (end == 0) {
      end = columns;
      while (is_continuation(text[end])) --end;
    }
    lines += text.substr(0, end) + "\n";
    text = std::string(indent, ' ') +
           text.substr(text.find_first_not_of(' ', end));
  }
  return lines + text + "\n";
}

}  // namespace shardbook::pictures::text_table
