#include "sim/json_object.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "core/check.h"

namespace shardbook::json_file {

namespace {

constexpr std::size_t kLongestText = 60;
constexpr std::size_t kLongestValue = 40;
constexpr int kDeepest = 64;

/// Number of letters to change, insert or remove between two words.
std::size_t distance(const std::string& a, const std::string& b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t changed = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({changed, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

std::string ascii(const Json& value) {
  return value.dump(-1, ' ', true, Json::error_handler_t::replace);
}

/// "line 3, column 7" of a byte of the text.
std::string position(const std::string& text, std::size_t byte) {
  byte = std::min(byte, text.size());
  const auto end = text.begin() + static_cast<std::ptrdiff_t>(byte);
  const auto line = std::count(text.begin(), end, '\n');
  const std::size_t begin =
      byte == 0 ? std::string::npos : text.rfind('\n', byte - 1);
  const std::size_t column = begin == std::string::npos ? byte : byte - begin;
  return fmt::format("line {}, column {}", line + 1,
                     std::max<std::size_t>(column, 1));
}

bool is_of_name(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' ||
         c == '-' || c == '.';
}

/// The name without quotes that begins here, if a colon follows it; or nothing.
std::string bare_name(const std::string& text, std::size_t begin) {
  std::size_t end = begin;
  while (end < text.size() && is_of_name(text[end])) ++end;
  const std::size_t colon = text.find_first_not_of(" \t", end);
  const bool is_name = end > begin && colon < text.size() && text[colon] == ':';
  return is_name ? text.substr(begin, end - begin) : "";
}

/// What a text that is no JSON looks like, after " on"; `byte`: where it fails.
std::string other_form(const std::string& text, std::size_t byte) {
  std::size_t first = text.find_first_not_of(" \t\r\n");
  while (first < text.size() && text[first] == '#') {
    first = text.find_first_not_of(" \t\r\n", text.find('\n', first));
  }
  const bool is_document =
      text.compare(std::min(first, text.size()), 3, "---") == 0;
  if (is_document || !bare_name(text, std::min(first, text.size())).empty()) {
    const bool is_of_accelerate =
        text.find("distributed_type:") != std::string::npos;
    return is_of_accelerate
               ? ": this is YAML of `accelerate config`; give a file for "
                 "DeepSpeed, which is JSON, such as its deepspeed_config_file"
               : ": this is YAML; give JSON";
  }
  std::size_t begin = std::min(byte, text.size());
  while (begin > 0 && is_of_name(text[begin - 1])) --begin;
  const std::string name = bare_name(text, begin);
  if (name.empty()) return "";
  return ": the name " + printable(name) +
         " has no quotes, as in Hjson; put names in quotes and commas between "
         "entries";
}

}  // namespace

const Units& seconds() {
  static const Units units = {
      {"s", 1}, {"ms", 1e-3}, {"us", 1e-6}, {"ns", 1e-9}};
  return units;
}

const Units& bytes() {
  static const Units units = {{"KB", 1e3},           {"MB", 1e6},
                              {"GB", 1e9},           {"TB", 1e12},
                              {"KiB", 1024.0},       {"MiB", 1024.0 * 1024},
                              {"GiB", 1073741824.0}, {"TiB", 1099511627776.0}};
  return units;
}

const Units& bytes_per_second() {
  static const Units units = {{"MB_per_s", 1e6},
                              {"GB_per_s", 1e9},
                              {"TB_per_s", 1e12},
                              {"Gb_per_s", 1e9 / 8}};
  return units;
}

std::string list(const std::vector<std::string>& names) {
  if (names.size() < 2) return names.empty() ? "" : names[0];
  return fmt::format("{} or {}",
                     fmt::join(names.begin(), names.end() - 1, ", "),
                     names.back());
}

std::string printable(const std::string& text) {
  std::string result;
  for (const char c : text) {
    if (result.size() == kLongestText) return result + "...";
    result += c >= 0x20 && c < 0x7f ? c : '?';
  }
  return result;
}

std::string printable(const Json& value) {
  if (value.is_object()) return "an object";
  if (value.is_array()) return "a list";
  return printable(ascii(value));
}

std::string shown(const Json& value) {
  std::string text = ascii(value);
  if (text.size() > kLongestValue) {
    text = text.substr(0, kLongestValue - 3) + "...";
  }
  std::replace(text.begin(), text.end(), '\x7f', '?');
  return text;
}

std::string nearest(const std::string& word,
                    const std::vector<std::string>& known, std::size_t most) {
  std::string best;
  std::size_t best_distance = std::min(word.size() / 2, most) + 1;
  if (word.size() > kLongestText) return best;
  for (const std::string& name : known) {
    if (word.size() > 2 && name.rfind(word, 0) == 0) return name;
    const std::size_t d = distance(word, name);
    if (d < best_distance) {
      best = name;
      best_distance = d;
    }
  }
  return best;
}

bool is_too_deep(const std::string& text) {
  int depth = 0;
  bool is_in_quotes = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '"') {
      is_in_quotes = !is_in_quotes;
    } else if (is_in_quotes) {
      if (c == '\\') ++i;
    } else if (c == '[' || c == '{') {
      if (++depth > kDeepest) return true;
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return false;
}

void check_depth(const std::string& text, const std::string& file) {
  SB_CHECK(!is_too_deep(text), file,
           ": lists and objects are nested more than ", kDeepest,
           " deep; give at most ", kDeepest, " levels");
}

std::string plain_json(const std::string& text) {
  std::string plain = text;
  std::size_t comma = std::string::npos;  // no value has followed it so far
  const auto blank = [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < std::min(end, plain.size()); ++i) {
      if (plain[i] != '\n') plain[i] = ' ';
    }
  };
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    const char next = i + 1 < text.size() ? text[i + 1] : '\0';
    if (c == '#' || (c == '/' && (next == '/' || next == '*'))) {
      const bool is_block = next == '*' && c == '/';
      std::size_t end =
          text.find(is_block ? "*/" : "\n", i + (is_block ? 2 : 0));
      // A comment that never ends stays, and is no JSON
      if (is_block && end == std::string::npos) return plain;
      end = std::min(end, text.size()) + (is_block ? 2 : 0);
      blank(i, end);
      i = end - 1;
    } else if (c == '"') {
      for (++i; i < text.size() && text[i] != '"'; ++i) i += text[i] == '\\';
      comma = std::string::npos;
    } else if ((c == '}' || c == ']') && comma != std::string::npos) {
      plain[comma] = ' ';
      comma = std::string::npos;
    } else if (c == ',') {
      // Two commas, or one after nothing, are no JSON
      const std::size_t before = plain.find_last_not_of(" \t\r\n", i - 1);
      const bool follows =
          i > 0 && before != std::string::npos &&
          std::string("{[,").find(plain[before]) == std::string::npos;
      comma = follows ? i : std::string::npos;
    } else if (std::string(" \t\r\n").find(c) == std::string::npos) {
      comma = std::string::npos;
    }
  }
  return plain;
}

Json parse_json(const std::string& text, const std::string& file) {
  check_depth(text, file);
  // nlohmann-json keeps the last of two equal keys; here that is an error.
  std::vector<std::set<std::string>> keys;
  std::string twice;
  auto callback = [&](int, Json::parse_event_t event, Json& value) {
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key) {
      const std::string& key = value.get_ref<const std::string&>();
      if (!keys.back().insert(key).second) twice = key;
    }
    return true;
  };
  Json json;
  try {
    json = Json::parse(text, callback);
  } catch (const Json::parse_error& error) {
    const std::size_t byte = error.byte > 0 ? error.byte - 1 : 0;
    SB_FAIL(file, ": not JSON from ", position(text, byte), " on",
            other_form(text, byte));
  } catch (const Json::exception&) {
    SB_FAIL(file, ": a number is too large for any computer");
  }
  SB_CHECK(twice.empty(), file, ": the key \"", printable(twice),
           "\" stands twice in one object; keep one");
  return json;
}

namespace {

/// Converts a number without a fraction to an integer, up to 2^53, where each
/// whole number is a double; returns anything else unchanged.
Json as_integer(const Json& value) {
  const double number = value.is_number_float() ? value.get<double>() : 0.5;
  const bool is_whole = number == std::floor(number) && number >= 0 &&
                        number <= static_cast<double>(std::int64_t{1} << 53);
  return is_whole ? Json(static_cast<std::int64_t>(number)) : value;
}

}  // namespace

JsonObject::JsonObject(const Json& json, std::string file, std::string path,
                       std::vector<std::string>* problems)
    : json_(&json),
      file_(std::move(file)),
      path_(std::move(path)),
      problems_(problems) {
  if (json.is_object()) return;
  check(false, file_, ": ", path_.empty() ? "/" : path_, ": ", printable(json),
        " is not allowed; give an object, {...}");
  static const Json empty = Json::object();
  json_ = &empty;
}

std::string JsonObject::where(const std::string& key) const {
  const auto other = other_names_.find(key);
  const bool is_other = other != other_names_.end() && !json_->contains(key) &&
                        json_->contains(other->second);
  return file_ + ": " + path_ + "/" + (is_other ? other->second : key);
}

void JsonObject::also(const std::string& key, const std::string& other) {
  other_names_[key] = other;
  known_.push_back(other);
  check(!json_->contains(key) || !json_->contains(other),
        file_ + ": " + path_ + "/" + other, ": is another name of ", path_, "/",
        key, ", which the file has as well; keep that one");
}

const Json* JsonObject::find(const std::string& key) {
  if (!is_known(key)) known_.push_back(key);
  auto found = json_->find(key);
  const auto other = other_names_.find(key);
  if (found == json_->end() && other != other_names_.end()) {
    found = json_->find(other->second);
  }
  return found == json_->end() ? nullptr : &*found;
}

template <typename T>
void JsonObject::read(const std::string& key, bool (Json::*is_type)() const,
                      const char* hint, T& value) {
  const Json* json = find(key);
  if (json == nullptr) return;
  check((json->*is_type)(), where(key), ": ", printable(*json),
        " is not allowed; give ", hint);
  if ((json->*is_type)()) value = json->get<T>();
}

void JsonObject::text(const std::string& key, std::string& value) {
  read(key, &Json::is_string, "a text in quotes", value);
}

void JsonObject::flag(const std::string& key, bool& value) {
  read(key, &Json::is_boolean, "true or false", value);
}

void JsonObject::choice(const std::string& key,
                        const std::vector<std::string>& names,
                        std::string& value) {
  std::string chosen = value;
  text(key, chosen);
  const bool is_known = chosen == value || std::find(names.begin(), names.end(),
                                                     chosen) != names.end();
  check(is_known, where(key), ": \"", printable(chosen), "\" is unknown; give ",
        list(names));
  if (is_known) value = chosen;
}

void JsonObject::integer(const std::string& key, std::int64_t min,
                         std::int64_t max, int& value) {
  std::int64_t number = value;
  whole(key, min, max, number);
  value = static_cast<int>(number);
}

void JsonObject::whole(const std::string& key, std::int64_t min,
                       std::int64_t max, std::int64_t& value) {
  if (const Json* json = find(key)) {
    attempt(
        [&] { value = integer_at(as_integer(*json), where(key), min, max); });
  }
}

void JsonObject::number(const std::string& key, double min, double max,
                        double& value) {
  if (const Json* json = find(key)) {
    attempt([&] { value = number_at(*json, where(key), min, max); });
  }
}

void JsonObject::quantity(const std::string& prefix, const Units& units,
                          double max, bool zero, double& value) {
  prefixes_.emplace_back(prefix + "_", &units);
  std::string given;
  for (const Unit& unit : units) {
    const std::string key = prefix + "_" + unit.name;
    const Json* json = find(key);
    if (json == nullptr) continue;
    attempt([&] {
      SB_CHECK(given.empty(), where(key), ": says the same as ", given,
               "; keep one of them");
      given = key;
      const double number = number_at(*json, where(key), 0, max / unit.factor);
      SB_CHECK(zero || number > 0, where(key),
               ": 0 is not allowed; give a number above 0");
      value = number * unit.factor;
    });
  }
}

void JsonObject::check_key(const std::string& key, const Json& value) const {
  if (!key.empty() && key[0] == '_') {
    SB_CHECK(value.is_string(), where(printable(key)),
             ": a remark is a text in quotes");
    return;
  }
  if (is_known(key)) return;
  for (const auto& [prefix, units] : prefixes_) {
    // "latency_min" is a wrong unit, "latenzy_us" is a wrong word.
    if (key.rfind(prefix, 0) == 0) {
      std::vector<std::string> names;
      for (const Unit& unit : *units) names.push_back(unit.name);
      SB_FAIL(where(printable(key)), ": the unit \"",
              printable(key.substr(prefix.size())), "\" is unknown; after \"",
              prefix, "\" give ", list(names));
    }
  }
  const std::string guess = nearest(key, known_);
  SB_FAIL(where(printable(key)), ": unknown key; ",
          guess.empty() ? "known are " + list(known_)
                        : "did you mean \"" + guess + "\"?");
}

void JsonObject::finish() const {
  for (const auto& [key, value] : json_->items()) {
    attempt([&, &key = key, &value = value] { check_key(key, value); });
  }
}

double number_at(const Json& value, const std::string& where, double min,
                 double max) {
  const double number = value.is_number() ? value.get<double>() : NAN;
  SB_CHECK(number >= min && number <= max, where, ": ", printable(value),
           " is not allowed; give a number from ", min, " to ", max);
  return number;
}

std::int64_t integer_at(const Json& value, const std::string& where,
                        std::int64_t min, std::int64_t max) {
  const bool fits = value.is_number_integer() &&
                    (!value.is_number_unsigned() ||
                     value.get<std::uint64_t>() <= INT64_MAX) &&
                    value >= min && value <= max;
  SB_CHECK(fits, where, ": ", printable(value),
           " is not allowed; give a whole number from ", min, " to ", max);
  return value.get<std::int64_t>();
}

}  // namespace shardbook::json_file
