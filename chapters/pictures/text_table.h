#pragma once

// Tables of text.

#include <string>
#include <vector>

namespace shardbook::pictures::text_table {

using Row = std::vector<std::string>;

/// The width of a text in columns of the screen.
std::size_t width(const std::string& text);

/// Rows of equal length as lines, with two spaces between the columns.
std::string align(const std::vector<Row>& rows);

}  // namespace shardbook::pictures::text_table
