#pragma once

// Values of a JSON object, looked up by paths such as "options.world_size".

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "sim/json_object.h"

namespace shardbook::table::internal {

using Json = nlohmann::ordered_json;
using json_file::shown;

// Looks values up by a path of keys, and names file and path when one is
// missing or of the wrong type.
class JsonReader {
 public:
  JsonReader(const Json& object, std::string source)
      : object_(object), source_(std::move(source)) {}

  // The value at "options.world_size", or null when it is not there.
  const Json& at(const std::string& path) const {
    static const Json kMissing;
    const Json* value = &object_;
    for (std::size_t begin = 0; begin <= path.size();) {
      const std::size_t end = std::min(path.find('.', begin), path.size());
      const std::string key = path.substr(begin, end - begin);
      if (!value->is_object() || !value->contains(key)) return kMissing;
      value = &(*value)[key];
      begin = end + 1;
    }
    return *value;
  }

  std::string text(const std::string& path) const {
    const Json& value = require(path);
    SB_CHECK(value.is_string(), where(path), " is ", shown(value),
             "; it has to be a string");
    return value.get<std::string>();
  }

  std::int64_t count(const std::string& path) const {
    const Json& value = require(path);
    SB_CHECK(value.is_number_integer() && value >= 0, where(path), " is ",
             shown(value), "; it has to be a whole number from 0 up");
    return value.get<std::int64_t>();
  }

  std::optional<double> number(const std::string& path) const {
    const Json& value = at(path);
    if (value.is_null()) return std::nullopt;
    SB_CHECK(value.is_number(), where(path), " is ", shown(value),
             "; it has to be a number");
    return value.get<double>();
  }

  // The words at `paths` that are there, joined by commas.
  std::string words(const std::vector<std::string>& paths) const {
    std::string text;
    for (const std::string& path : paths) {
      if (!at(path).is_string()) continue;
      text += (text.empty() ? "" : ", ") + at(path).get<std::string>();
    }
    return text;
  }

  // A number from 0 up, if there is one.
  std::optional<double> amount(const std::string& path) const {
    const auto value = number(path);
    SB_CHECK(!value || *value >= 0, where(path), " is ", shown(at(path)),
             "; it has to be a number from 0 up");
    return value;
  }

  // Whether there is an object.
  bool object(const std::string& path) const {
    const Json& value = at(path);
    SB_CHECK(value.is_object() || value.is_null(), where(path), " is ",
             shown(value), "; it has to be an object or null");
    return value.is_object();
  }

  // The elements of an array; none when it is missing.
  std::vector<Json> list(const std::string& path) const {
    const Json& value = at(path);
    if (value.is_null()) return {};
    SB_CHECK(value.is_array(), where(path), " is ", shown(value),
             "; it has to be a list with one element per rank");
    return value.get<std::vector<Json>>();
  }

  // Members of a pair {"predicted": ..., "counted": ...} at `path`.
  double member(const Json& pair, const char* key,
                const std::string& path) const {
    SB_CHECK(pair.is_object() && pair.contains(key), where(path), " has no ",
             key, " number of bytes");
    const Json& value = pair[key];
    // An average over ranks may be a fraction of a byte.
    SB_CHECK(value.is_number() && value.get<double>() >= 0 &&
                 value.get<double>() < 9e18,
             where(path), ".", key, " is ", shown(value),
             "; it has to be a number of bytes from 0 up");
    return std::round(value.get<double>());
  }

 private:
  const Json& require(const std::string& path) const {
    const Json& value = at(path);
    SB_CHECK(!value.is_null(), where(path), " is missing");
    return value;
  }

  std::string where(const std::string& path) const {
    return source_ + ": " + path;
  }

  const Json& object_;
  std::string source_;
};

}  // namespace shardbook::table::internal
