#pragma once

// Published results, one table per CSV file of bench/validate. Its columns are
// named in the first line; `source` names the origin of a row.

#include <string>
#include <vector>

namespace shardbook::validate {

class Row {
 public:
  Row(std::string place, std::vector<std::string> names,
      std::vector<std::string> values);

  /// "FILE:LINE".
  const std::string& place() const { return place_; }
  /// Whether there is such a column, with a value.
  bool has(const std::string& column) const;
  /// Throws Error that names the file, the line and the column when there is
  /// no such column or, for the others, no such value.
  const std::string& text(const std::string& column) const;
  /// Whether the text of a column has this word, or begins with it.
  bool says(const std::string& column, const std::string& word) const;
  bool begins(const std::string& column, const std::string& word) const;
  double number(const std::string& column) const;
  int integer(const std::string& column) const;
  /// A number above 0; a whole number from 1 to `max`.
  double positive(const std::string& column) const;
  int count(const std::string& column, int max = 2'000'000'000) const;
  /// 0, 1, True or False.
  bool flag(const std::string& column) const;

 private:
  std::string place_;
  std::vector<std::string> names_, values_;
};

struct Table {
  std::string file;
  std::vector<std::string> columns;
  std::vector<Row> rows;
};

/// Values may be quoted: "a, b", with "" for a quote. Throws Error that names
/// the file and the line.
Table open_table(const std::string& file);

}  // namespace shardbook::validate
