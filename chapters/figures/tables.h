#pragma once

// Measured and published results that figures draw: CSV files of bench/.

#include <map>
#include <string>
#include <vector>

namespace shardbook::figures {

/// The rows of a CSV file by the names in its first line; empty values are left
/// out. A value with commas is in quotes. `file` counts from the root of the
/// book. Throws Error if the file cannot be read, or a row has too many values.
using TableRow = std::map<std::string, std::string>;
std::vector<TableRow> read_table(const std::string& file);

}  // namespace shardbook::figures
