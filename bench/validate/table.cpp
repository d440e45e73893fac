#include "bench/validate/table.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>

#include "core/check.h"

namespace shardbook::validate {

namespace {

std::vector<std::string> split(const std::string& line,
                               const std::string& place) {
  std::vector<std::string> values(1);
  bool quoted = false;
  for (std::size_t i = 0; i < line.size(); ++i) {
    const char c = line[i];
    if (quoted && c == '"' && i + 1 < line.size() && line[i + 1] == '"') {
      values.back() += line[++i];
    } else if (c == '"') {
      quoted = !quoted;
    } else if (c == ',' && !quoted) {
      values.emplace_back();
    } else {
      values.back() += c;
    }
  }
  SB_CHECK(!quoted, place, ": a quote is not closed");
  return values;
}

}  // namespace

Row::Row(std::string place, std::vector<std::string> names,
         std::vector<std::string> values)
    : place_(std::move(place)),
      names_(std::move(names)),
      values_(std::move(values)) {
  SB_CHECK(names_.size() == values_.size(), place_, ": ", values_.size(),
           " values for ", names_.size(), " columns");
}

const std::string& Row::text(const std::string& column) const {
  const auto found = std::find(names_.begin(), names_.end(), column);
  SB_CHECK(found != names_.end(), place_, ": no column \"", column, "\"");
  return values_[static_cast<std::size_t>(found - names_.begin())];
}

double Row::number(const std::string& column) const {
  const std::string& value = text(column);
  char* end = nullptr;
  const double number = std::strtod(value.c_str(), &end);
  SB_CHECK(!value.empty() && *end == '\0' && std::isfinite(number), place_,
           ": ", column, " is \"", value, "\", which is no number");
  return number;
}

int Row::integer(const std::string& column) const {
  const double value = number(column);
  SB_CHECK(value == std::floor(value) && std::abs(value) < 2e9, place_, ": ",
           column, " is ", value, ", which is no whole number");
  return static_cast<int>(value);
}

std::vector<Row> read_table(const std::string& file) {
  std::ifstream stream(file);
  SB_CHECK(stream.good(), file, ": cannot be opened");
  std::vector<Row> rows;
  std::vector<std::string> names;
  std::string line;
  for (int number = 1; std::getline(stream, line); ++number) {
    if (!line.empty() && line.back() == '\r') line.pop_back();
    if (line.empty()) continue;
    const std::string place = file + ":" + std::to_string(number);
    if (names.empty()) {
      names = split(line, place);
    } else {
      rows.emplace_back(place, names, split(line, place));
    }
  }
  SB_CHECK(!names.empty(), file, ": is empty");
  return rows;
}

}  // namespace shardbook::validate
