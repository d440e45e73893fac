// Values of a config as DeepSpeed's classes read them.

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <set>
#include <sstream>

#include "chapters/15_engine/internal/config_rules.h"
#include "chapters/15_engine/internal/deepspeed_keys.h"
#include "sim/json_object.h"

namespace shardbook::engine::internal {

std::string lower_case(std::string text) {
  for (char& c : text) {
    c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  return text;
}

namespace {

using json_file::Json;

constexpr double kExact = 9007199254740992;  // 2^53

bool is_in(const std::set<std::string>& words, const Json& value) {
  return value.is_string() &&
         words.count(lower_case(value.get<std::string>())) > 0;
}

std::string read_flag(Json& value) {
  if (value.is_boolean()) return "";
  const bool is_true =
      value == 1 || is_in({"1", "on", "t", "true", "y", "yes"}, value);
  const bool is_false =
      value == 0 || is_in({"0", "off", "f", "false", "n", "no"}, value);
  if (!is_true && !is_false) return "true or false";
  value = is_true;
  return "";
}

/// A number in quotes, of these characters; NaN where the text is none.
double number_in(std::string text, const std::string& allowed) {
  text.erase(std::remove(text.begin(), text.end(), '_'), text.end());
  const std::size_t begin = text.find_first_not_of(" \t");
  if (begin == std::string::npos) return NAN;
  text = text.substr(begin, text.find_last_not_of(" \t") + 1 - begin);
  if (text.find_first_not_of(allowed) != std::string::npos) return NAN;
  char* end = nullptr;
  const double number = std::strtod(text.c_str(), &end);
  return *end == '\0' ? number : NAN;
}

std::string range_of(const std::string& what, double min, double max) {
  std::ostringstream text;
  text << what;
  if (std::isfinite(min)) text << " from " << min;
  if (std::isfinite(max)) text << " to " << max;
  return text.str();
}

/// `type` is i, n, p, f or r.
std::string read_number(char type, bool allows_flags, Json& value) {
  const bool is_whole = type == 'i' || type == 'n' || type == 'p';
  const double min = type == 'p'                  ? 1
                     : type == 'n' || type == 'r' ? 0
                                                  : -INFINITY;
  const double max = type == 'r' ? 1 : INFINITY;
  double number = NAN;
  if (value.is_number()) number = value.get<double>();
  if (value.is_boolean() && allows_flags) number = value.get<bool>() ? 1 : 0;
  if (value.is_string()) {
    // An exponent is part of a fraction only
    const char* const allowed = !is_whole      ? "+-0123456789.eE"
                                : allows_flags ? "+-0123456789."
                                               : "+-0123456789";
    number = number_in(value.get<std::string>(), allowed);
  }
  const bool fits = number >= min && number <= max && std::isfinite(number) &&
                    (!is_whole || number == std::floor(number));
  if (!fits)
    return range_of(is_whole ? "a whole number" : "a number", min, max);
  if (is_whole && !value.is_number_integer() && std::abs(number) <= kExact) {
    value = static_cast<std::int64_t>(number);
  } else if (!value.is_number()) {
    value = number;
  }
  return "";
}

std::string read_texts(const Json& value) {
  const bool fits = value.is_string() ||
                    (value.is_array() && std::all_of(value.begin(), value.end(),
                                                     [](const Json& each) {
                                                       return each.is_string();
                                                     }));
  return fits ? "" : "a text in quotes, or a list of texts";
}

std::string read_choice(const std::string& names, const Json& value) {
  std::istringstream in(names);
  std::vector<std::string> known;
  for (std::string name; std::getline(in, name, '|');) known.push_back(name);
  const std::set<std::string> words(known.begin(), known.end());
  return is_in(words, value) ? "" : json_file::list(known);
}

}  // namespace

std::string read_value(const std::string& type, Json& value) {
  if (type.empty()) return "";
  const bool allows_null = type.back() == '?';
  if (allows_null && value.is_null()) return "";
  const bool allows_flags = type.back() != '!';
  const std::string kind =
      allows_null || !allows_flags ? type.substr(0, type.size() - 1) : type;
  if (kind.find('|') != std::string::npos) return read_choice(kind, value);
  switch (kind[0]) {
    case 'b':
      return read_flag(value);
    case 's':
      return value.is_string() ? "" : "a text in quotes";
    case 'l':
      return value.is_array() ? "" : "a list, [...]";
    case 't':
      return read_texts(value);
    case 'o':
      return value.is_object() ? "" : "an object, {...}";
    default:
      return read_number(kind[0], allows_flags, value);
  }
}

}  // namespace shardbook::engine::internal
