#include "chapters/figures/tables.h"

#include <cstddef>
#include <fstream>

#include "core/check.h"

namespace shardbook::figures {
namespace {

std::vector<std::string> values_of(const std::string& line) {
  std::vector<std::string> values(1);
  bool is_quoted = false;
  for (const char c : line) {
    if (c == '"') {
      is_quoted = !is_quoted;
    } else if (c == ',' && !is_quoted) {
      values.emplace_back();
    } else {
      values.back() += c;
    }
  }
  return values;
}

}  // namespace

std::vector<TableRow> read_table(const std::string& file) {
  std::ifstream lines(SHARDBOOK_ROOT "/" + file);
  std::string line;
  SB_CHECK(std::getline(lines, line), file, ": cannot be read");
  const std::vector<std::string> names = values_of(line);
  std::vector<TableRow> rows;
  while (std::getline(lines, line)) {
    const std::vector<std::string> values = values_of(line);
    SB_CHECK(values.size() <= names.size(), file, ": ", values.size(),
             " values for ", names.size(), " columns: ", line);
    TableRow row;
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (!values[i].empty()) row[names[i]] = values[i];
    }
    rows.push_back(row);
  }
  return rows;
}

}  // namespace shardbook::figures
