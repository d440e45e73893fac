#pragma once

// Tables of text.

#include <string>
#include <vector>

namespace shardbook::pictures::text_table {

using Row = std::vector<std::string>;

/// Columns of a terminal that lines should fit.
constexpr std::size_t kColumns = 80;

/// The width of a text in columns of the screen: two of a Chinese character;
/// colours take none.
std::size_t width(const std::string& text);

/// Rows of equal length as lines, with two spaces between the columns. If lines
/// would be wider than `columns`, texts of the first column are cut.
std::string align(std::vector<Row> rows,
                  std::size_t columns = std::string::npos);

/// A text as lines that fit, broken at spaces, but not between a number and its
/// unit; all lines but the first begin with `indent` spaces. A word that does not
/// fit is cut.
std::string wrap(std::string text, std::size_t indent = 0,
                 std::size_t columns = kColumns);

}  // namespace shardbook::pictures::text_table
