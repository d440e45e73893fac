#pragma once

// Tables in a terminal.

#include <string>
#include <vector>

namespace shardbook::table::internal {

using Row = std::vector<std::string>;

/// The width of a text in columns of the screen.
std::size_t width(const std::string& text);

/// Rows of equal length as lines, with two spaces between the columns.
std::string align(const std::vector<Row>& rows);

}  // namespace shardbook::table::internal
