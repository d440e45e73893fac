#pragma once

// Published results, one table per CSV file of bench/validate. Its columns are
// named in the first line; `source` says where a row was read.

#include <string>
#include <vector>

namespace shardbook::validate {

class Row {
 public:
  Row(std::string place, std::vector<std::string> names,
      std::vector<std::string> values);

  /// Throws Error that names the file, the line and the column when there is
  /// no such column or, for the others, no such value.
  const std::string& text(const std::string& column) const;
  double number(const std::string& column) const;
  int integer(const std::string& column) const;

 private:
  std::string place_;
  std::vector<std::string> names_, values_;
};

/// Values may be quoted: "a, b", with "" for a quote. Throws Error that names
/// the file and the line.
std::vector<Row> read_table(const std::string& file);

}  // namespace shardbook::validate
