#pragma once

// All keys that a config may have: DeepSpeed's, by section, and the book's own.

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace shardbook::engine::internal {

enum class Effect {
  kActs,     ///< config.cpp reads it
  kNone,     ///< it cannot change numbers: a remark reports no effect
  kChanges,  ///< it would change numbers: an error, unless the value is harmless
  kInside    ///< inside a section which has no effect: no remark of its own
};

/// A row of the table.
struct KnownKeys {
  const char* section;  ///< "" or "/zero_optimization"
  const char* keys;     ///< names, with spaces between them
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

/// The result of checking a file against the table.
struct SortedKeys {
  nlohmann::json acting;               ///< the file without the other keys
  std::vector<std::string> acts;       ///< paths
  std::vector<std::string> no_effect;  ///< remarks, which begin with the path
  std::vector<std::string> defaults;   ///< paths of "auto" that DeepSpeed drops
  std::vector<std::string> problems;   ///< messages
  /// Paths that a misspelt key was likely meant to have.
  std::vector<std::string> meant;
};
SortedKeys sort_keys(const nlohmann::json& json, const std::string& label);

}  // namespace shardbook::engine::internal
