#pragma once

// All keys that a config may have: DeepSpeed's, by section, and the book's own.

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace shardbook::engine::internal {

enum class Effect {
  kActs,     ///< config_sections.cpp reads it
  kNone,     ///< it cannot change numbers: a remark reports no effect
  kChanges,  ///< it would change numbers: an error, unless the value is harmless
  kInside,   ///< inside a section which has no effect: no remark of its own
  kGone      ///< DeepSpeed 0.19.8 refuses it, so any value is an error
};

/// A row of the table.
struct KnownKeys {
  const char* section;  ///< "" or "/zero_optimization"
  /// Names, with spaces between them; after a colon, the type of the value as
  /// `read_value` knows it.
  const char* keys;
  Effect effect;
  /// JSON of the value equal to a missing key; "off": a section in which no
  /// `enabled` is true; "": there is none.
  const char* harmless;
  /// The reason of the effect. Of keys that act: why --resume does not compare
  /// them, because they cannot change numbers or are compared as options; "":
  /// it does.
  const char* why;
};
const std::vector<KnownKeys>& known_keys();
/// The row of a key; null for an unknown one.
const KnownKeys* row_of(const std::string& section, const std::string& key);

struct KnownKey {
  std::string name;
  std::string type;  ///< empty: any value
};
std::vector<KnownKey> keys_of(const KnownKeys& row);

/// Reads a value as DeepSpeed's config classes do (pydantic): true, "2" and 2.0
/// are numbers, "yes" and 1 are true. Replaces it by the JSON of its type, and
/// returns what would be allowed; empty: the value is.
///
///   b flag   i whole number   n from 0   p from 1   f number   r from 0 to 1
///   s text   l list   t a text, or a list of texts   o object
///   x|y|z one of these texts
///
/// After these, ? also allows null; ! allows no true, no false and no text with a
/// point for a number.
std::string read_value(const std::string& type, nlohmann::json& value);

/// The result of checking a file against the table.
struct SortedKeys {
  nlohmann::json acting;               ///< the file without the other keys
  std::vector<std::string> acts;       ///< paths
  std::vector<std::string> no_effect;  ///< remarks, which begin with the path
  std::vector<std::string> defaults;   ///< paths of "auto" that DeepSpeed drops
  std::vector<std::string> problems;   ///< messages
  /// Known keys of /optimizer/params and /scheduler/params, with an effect or
  /// without: paths.
  std::vector<std::string> parameters;
  /// Paths that a misspelt key was likely meant to have.
  std::vector<std::string> meant;
};
SortedKeys sort_keys(const nlohmann::json& json, const std::string& label);

}  // namespace shardbook::engine::internal
