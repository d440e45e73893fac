#pragma once

// Reads one object of a JSON file, with errors that a person can act on:
//
//   my.json: /network/latency_us: -5 is not allowed; give a number from 0 to
//   1e+06
//
// The caller says which keys there are; values that the file leaves out do not
// change. Keys that begin with an underscore are remarks. The first mistake
// throws, unless the caller gives a list in which all of them are collected.

#include <algorithm>
#include <cstdint>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"

namespace shardbook::json_file {

using Json = nlohmann::json;

/// The last part of a quantity's key, and its factor to SI units.
struct Unit {
  const char* name;
  double factor;
};
using Units = std::vector<Unit>;
const Units& seconds();           ///< _s, _ms, _us, _ns
const Units& bytes();             ///< _KB, _MB, _GB, _TB, _KiB, ...
const Units& bytes_per_second();  ///< _MB_per_s, _GB_per_s, _Gb_per_s, ...

/// True if lists and objects are nested more than 64 deep. The JSON library
/// copies and writes values by calling itself once per level: a deep value
/// would use up the stack.
bool is_too_deep(const std::string& text);

/// Throws Error for a text that is too deep. `file` is its name in messages.
void check_depth(const std::string& text, const std::string& file);

/// Parses a whole file; checks its depth first.
Json parse_json(const std::string& text, const std::string& file);

/// JSON for a text that has Hjson's comments (#, //, /* */) or a comma before a
/// closing bracket. Spaces replace them, and positions stay.
std::string plain_json(const std::string& text);

/// Text for a message: printable, and not too long.
std::string printable(const std::string& text);
std::string printable(const Json& value);
/// The same with the elements of lists and objects, up to 40 characters.
std::string shown(const Json& value);

/// "a, b or c".
std::string list(const std::vector<std::string>& names);

/// An entry of `known` that begins with `word`, else the nearest within `most`
/// edits; empty if there is none.
std::string nearest(const std::string& word,
                    const std::vector<std::string>& known,
                    std::size_t most = 6);

class JsonObject {
 public:
  /// `path` of the object in the file: "" or "/network". With `problems`, each
  /// message is added to them in place of an Error, and the value stays.
  JsonObject(const Json& json, std::string file, std::string path,
             std::vector<std::string>* problems = nullptr);

  const std::string& file() const { return file_; }
  std::vector<std::string>* problems() const { return problems_; }
  std::string where(const std::string& key) const;
  /// The value, or null where the file has none.
  const Json* find(const std::string& key);
  /// A second name of a key. A file has one of them.
  void also(const std::string& key, const std::string& other);

  /// Collects the Error that `read` throws, if errors are collected.
  template <typename Read>
  void attempt(Read read) const {
    try {
      read();
    } catch (const Error& error) {
      if (problems_ == nullptr) throw;
      problems_->emplace_back(error.what());
    }
  }
  /// Throws Error with the parts, or collects it, unless `holds`.
  template <typename... Parts>
  void check(bool holds, const Parts&... parts) const {
    attempt([&] { SB_CHECK(holds, parts...); });
  }

  // Each sets `value` where the key is present.
  void text(const std::string& key, std::string& value);
  void choice(const std::string& key, const std::vector<std::string>& names,
              std::string& value);
  void flag(const std::string& key, bool& value);
  /// A whole number may also be written as 5e8.
  void integer(const std::string& key, std::int64_t min, std::int64_t max,
               int& value);
  void whole(const std::string& key, std::int64_t min, std::int64_t max,
             std::int64_t& value);
  void number(const std::string& key, double min, double max, double& value);
  /// The key is `prefix` and a unit. The number is above 0, or 0 where `zero`
  /// is true; `max` is in SI units.
  void quantity(const std::string& prefix, const Units& units, double max,
                bool zero, double& value);
  /// Call last: an Error for each key that no call has named.
  void finish() const;

 private:
  template <typename T>
  void read(const std::string& key, bool (Json::*is_type)() const,
            const char* hint, T& value);
  bool is_known(const std::string& key) const {
    return std::find(known_.begin(), known_.end(), key) != known_.end();
  }
  /// Throws Error for a key that no call has named.
  void check_key(const std::string& key, const Json& value) const;

  const Json* json_;
  std::string file_, path_;
  std::vector<std::string>* problems_;
  std::vector<std::string> known_;
  std::map<std::string, std::string> other_names_;
  std::vector<std::pair<std::string, const Units*>> prefixes_;
};

/// A number of an array or object that has no reader of its own.
double number_at(const Json& value, const std::string& where, double min,
                 double max);
std::int64_t integer_at(const Json& value, const std::string& where,
                        std::int64_t min, std::int64_t max);

}  // namespace shardbook::json_file
