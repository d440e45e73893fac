#include "bench/validate/published_table.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>

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

bool Row::has(const std::string& column) const {
  const auto found = std::ranges::find(names_, column);
  return found != names_.end() &&
         !values_[static_cast<std::size_t>(found - names_.begin())].empty();
}

const std::string& Row::text(const std::string& column) const {
  const auto found = std::ranges::find(names_, column);
  SB_CHECK(found != names_.end(), place_, ": no column \"", column, "\"");
  return values_[static_cast<std::size_t>(found - names_.begin())];
}

bool Row::says(const std::string& column, const std::string& word) const {
  return text(column).find(word) != std::string::npos;
}

bool Row::begins(const std::string& column, const std::string& word) const {
  return text(column).rfind(word, 0) == 0;
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

double Row::positive(const std::string& column) const {
  const double value = number(column);
  SB_CHECK(value > 0, place_, ": ", column, " is ", value,
           "; give a number above 0");
  return value;
}

int Row::count(const std::string& column, int max) const {
  const int value = integer(column);
  SB_CHECK(value >= 1 && value <= max, place_, ": ", column, " is ", value,
           "; give a whole number from 1 to ", max);
  return value;
}

bool Row::flag(const std::string& column) const {
  const std::string& value = text(column);
  const bool is_true = value == "True" || value == "1";
  SB_CHECK(is_true || value == "False" || value == "0", place_, ": ", column,
           " is \"", value, "\"; give True or False");
  return is_true;
}

Table open_table(const std::string& file) {
  std::ifstream stream(file);
  SB_CHECK(stream.good() && !std::filesystem::is_directory(file), file,
           ": cannot be read");
  Table table;
  table.file = file;
  std::string line;
  for (int number = 1; std::getline(stream, line); ++number) {
    if (!line.empty() && line.back() == '\r') line.pop_back();
    if (line.empty()) continue;
    const std::string place = file + ":" + std::to_string(number);
    SB_CHECK(line.find('\0') == std::string::npos, place, ": is no text");
    if (table.columns.empty()) {
      table.columns = split(line, place);
      const std::set<std::string> different(table.columns.begin(),
                                            table.columns.end());
      SB_CHECK(different.size() == table.columns.size(), place,
               ": two columns have the same name");
    } else {
      table.rows.emplace_back(place, table.columns, split(line, place));
    }
  }
  SB_CHECK(!table.columns.empty(), file, ": is empty");
  SB_CHECK(!table.rows.empty(), file, ": has names of columns, but no rows");
  return table;
}

}  // namespace shardbook::validate
