#include "chapters/common/run/option_values.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <type_traits>
#include <utility>

#include "core/check.h"

namespace shardbook {

template <typename T>
std::string parse_number(const std::string& text, T* value, T min, T max) {
  constexpr bool is_real = std::is_floating_point_v<T>;
  T number{};
  std::size_t used = 0;
  try {
    if constexpr (is_real) {
      number = std::stod(text, &used);
    } else {
      const long long wide = std::stoll(text, &used);
      number = static_cast<T>(wide);
      if (static_cast<long long>(number) != wide) used = 0;
    }
  } catch (const std::exception&) {
    used = 0;
  }
  if (used == 0 || used != text.size()) {
    return fmt::format("not {}; give a value from {} to {}",
                       is_real ? "a number" : "an integer", min, max);
  }
  if constexpr (is_real) {
    if (std::isnan(number)) return "not a number";
  }
  if (number < min || number > max) {
    return fmt::format("out of range; give a value from {} to {}", min, max);
  }
  *value = number;
  return "";
}

template std::string parse_number(const std::string&, int*, int, int);
template std::string parse_number(const std::string&, std::int64_t*,
                                  std::int64_t, std::int64_t);
template std::string parse_number(const std::string&, std::uint64_t*,
                                  std::uint64_t, std::uint64_t);
template std::string parse_number(const std::string&, double*, double, double);

std::size_t num_typos(const std::string& a, const std::string& b) {
  std::vector<std::vector<std::size_t>> fewest(a.size() + 1);
  for (std::size_t i = 0; i <= a.size(); ++i) {
    for (std::size_t j = 0; j <= b.size(); ++j) {
      std::size_t typos = i + j;
      if (i > 0 && j > 0) {
        typos = std::min({fewest[i - 1][j] + 1, fewest[i][j - 1] + 1,
                          fewest[i - 1][j - 1] + (a[i - 1] != b[j - 1])});
      }
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        typos = std::min(typos, fewest[i - 2][j - 2] + 1);
      }
      fewest[i].push_back(typos);
    }
  }
  return fewest[a.size()][b.size()];
}

std::string check_name(const std::string& name,
                       const std::vector<std::string>& allowed,
                       const std::string& otherwise) {
  if (std::find(allowed.begin(), allowed.end(), name) != allowed.end())
    return "";
  return fmt::format("give one of {}{}{}", fmt::join(allowed, ", "),
                     otherwise.empty() ? "" : "; ", otherwise);
}

std::string parse_bytes(const std::string& text, std::int64_t* bytes) {
  const char* allowed = "give bytes, such as 1000000, 64MiB, 2GiB or 1.5GB";
  std::size_t used = 0;
  double number = -1;
  try {
    number = std::stod(text, &used);
  } catch (const std::exception&) {
    return allowed;
  }
  const std::string unit = text.substr(used);
  const std::pair<const char*, double> kUnits[] = {{"", 1},
                                                   {"B", 1},
                                                   {"KB", 1e3},
                                                   {"MB", 1e6},
                                                   {"GB", 1e9},
                                                   {"TB", 1e12},
                                                   {"KiB", 1024.0},
                                                   {"MiB", 1048576.0},
                                                   {"GiB", 1073741824.0},
                                                   {"TiB", 1099511627776.0}};
  for (const auto& [name, factor] : kUnits) {
    const double size = number * factor;
    if (unit == name && size >= 0 && size < 1e18) {
      *bytes = static_cast<std::int64_t>(size);
      return "";
    }
  }
  return allowed;
}

std::vector<int> read_counts(const std::string& option, const std::string& text,
                             const std::string& allowed) {
  std::vector<int> counts;
  std::size_t begin = 0;
  while (begin <= text.size()) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const std::string word = text.substr(begin, end - begin);
    const bool is_number =
        !word.empty() && word.size() <= 9 &&
        word.find_first_not_of("0123456789") == std::string::npos;
    SB_CHECK(is_number && std::stoi(word) >= 1, option, " ", text, ": ",
             allowed);
    counts.push_back(std::stoi(word));
    begin = end + 1;
  }
  return counts;
}

}  // namespace shardbook
