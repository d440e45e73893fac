// Checks a file against the table of keys.

#include <algorithm>
#include <map>
#include <sstream>

#include "chapters/15_engine/internal/deepspeed_keys.h"
#include "sim/json_object.h"

namespace shardbook::engine::internal {
namespace {

using json_file::Json;
using json_file::printable;

/// Longer lists of names do not help.
constexpr std::size_t kLongestList = 12;
constexpr std::size_t kMostAdvice = 100;

/// A section's other name has the same keys.
std::string section_of(const std::string& path) {
  return path == "/bfloat16" ? "/bf16" : path;
}

/// The names of each section, and their rows.
using Sections = std::map<std::string, std::map<std::string, const KnownKeys*>>;

const Sections& sections() {
  static const Sections all = [] {
    Sections found;
    for (const KnownKeys& row : known_keys()) {
      std::istringstream keys(row.keys);
      for (std::string key; keys >> key;) found[row.section][key] = &row;
    }
    return found;
  }();
  return all;
}

bool has_rows(const std::string& section) {
  return sections().count(section) > 0;
}

bool is_enabled_inside(const Json& json) {
  if (!json.is_structured()) return false;
  for (const auto& [key, value] : json.items()) {
    if (is_enabled_inside(value)) return true;
    if (json.is_object() && key == "enabled" && value == true) return true;
  }
  return false;
}

bool is_harmless(const KnownKeys& row, const Json& value) {
  const std::string harmless = row.harmless;
  if (harmless.empty()) return false;
  if (harmless != "off") return value == Json::parse(harmless);
  return value.is_object() ? !is_enabled_inside(value)
                           : value == false || value.is_null();
}

std::string way_out(const KnownKeys& row) {
  const std::string harmless = row.harmless;
  const bool has_one = std::string(row.why).find("; give") != std::string::npos;
  if (harmless.empty() || has_one) return "";
  const std::string give = harmless == "off" ? R"("enabled": false)" : harmless;
  return harmless == "null" ? "; leave it out"
                            : "; give " + give + ", or leave it out";
}

/// Sections whose classes in DeepSpeed drop "auto": the default holds.
bool drops_auto(const std::string& path) {
  const std::string section = section_of(path);
  return section.rfind("/zero_optimization", 0) == 0 || section == "/bf16" ||
         section == "/fp16" || section == "/tensor_parallel";
}

/// Why a key is unknown: it is misspelt, or belongs elsewhere.
std::string advice(const std::string& section, const std::string& key,
                   std::string& meant) {
  std::vector<std::string> here;
  for (const auto& [name, row] : sections().at(section)) here.push_back(name);
  const auto guessed = [&](const std::string& name) {
    meant = section + "/" + name;
    return "did you mean \"" + name + "\"?";
  };
  const std::string typo = json_file::nearest(key, here, 1);
  if (!typo.empty() && typo.size() <= key.size() + 1) return guessed(typo);
  for (const auto& [other, keys] : sections()) {
    const auto row = keys.find(key);
    if (row == keys.end() || row->second->effect != Effect::kActs) continue;
    meant = other + "/" + key;
    return "it belongs to " + meant;
  }
  // Half a name that only one key begins with
  std::vector<std::string> likely;
  for (const std::string& name : here) {
    if (name.rfind(key, 0) == 0) likely.push_back(name);
  }
  if (likely.size() == 1 && 2 * key.size() >= likely[0].size()) {
    return guessed(likely[0]);
  }
  // Short words are near to each other whatever they mean
  const std::size_t most = key.size() < 8 ? 1 : key.size() / 3;
  const std::string guess = json_file::nearest(key, here, most);
  if (likely.empty() && !guess.empty()) return guessed(guess);
  if (here.size() > kLongestList) {
    return "DeepSpeed has no such key" +
           (section.empty() ? "" : " in " + section);
  }
  std::string list;
  for (const std::string& name : here)
    list += (list.empty() ? "" : ", ") + name;
  return "known are " + list;
}

class Sorter {
 public:
  explicit Sorter(const std::string& label) : label_(label) {}

  /// Removes keys without effect from an object of the file.
  void sort(Json& json, const std::string& path) {
    std::vector<std::string> gone;
    for (auto& [key, value] : json.items()) {
      if (!key.empty() && key[0] == '_') {
        if (!value.is_string()) {
          fail(path + "/" + printable(key), "a remark is a text in quotes");
        }
        gone.push_back(key);
        continue;
      }
      if (!sort_key(path, key, value)) gone.push_back(key);
    }
    for (const std::string& key : gone) json.erase(key);
  }

  SortedKeys keys;

 private:
  void fail(const std::string& path, const std::string& message) {
    keys.problems.push_back(label_ + ": " + path + ": " + message);
  }

  void fail_unknown(const std::string& path, const std::string& section,
                    const std::string& key) {
    std::string meant;
    // No advice for more mistakes than anybody reads
    const bool is_read = keys.problems.size() < kMostAdvice;
    fail(path,
         "unknown key" + (is_read ? "; " + advice(section, key, meant) : ""));
    if (!meant.empty()) keys.meant.push_back(meant);
  }

  /// Whether the key acts.
  bool sort_key(const std::string& section, const std::string& key,
                Json& value) {
    const std::string path = section + "/" + printable(key);
    const KnownKeys* row = row_of(section_of(section), key);
    if (row == nullptr) {
      fail_unknown(path, section_of(section), key);
      return false;
    }
    if (row->effect == Effect::kActs) return sort_acting(*row, path, value);
    check_names(value, path);
    if (row->effect == Effect::kInside) return false;
    const bool is_auto = value == "auto" && drops_auto(section);
    if (row->effect == Effect::kChanges && !is_auto &&
        !is_harmless(*row, value)) {
      fail(path, (value.is_object() ? "" : printable(value) + " ") +
                     "is not offered: " + row->why + way_out(*row));
    } else {
      const bool is_off = row->effect == Effect::kChanges;
      keys.no_effect.push_back(
          path + ": has no effect here: " +
          (is_off ? "this value is what the book does without it" : row->why));
    }
    return false;
  }

  bool sort_acting(const KnownKeys& row, const std::string& path, Json& value) {
    if (value == "auto") {
      const std::string section = path.substr(0, path.rfind('/'));
      if (drops_auto(section) || path == "/pipeline/stages") {
        keys.defaults.push_back(path);
      } else {
        fail(path,
             "\"auto\" is for front ends, which know a value for some keys, "
             "and none has filled it; give a value");
      }
      return false;
    }
    if (is_harmless(row, value)) {
      keys.no_effect.push_back(path + ": null: as if it were left out");
      return false;
    }
    if (value.is_object() && has_rows(section_of(path))) {
      sort(value, path);
    } else {
      keys.acts.push_back(path);
    }
    return true;
  }

  /// Known names in a section that has no effect.
  void check_names(const Json& value, const std::string& path) {
    if (!value.is_object() || !has_rows(path)) return;
    for (const auto& [key, each] : value.items()) {
      if (key.empty() || key[0] == '_' || row_of(path, key) != nullptr)
        continue;
      fail_unknown(path + "/" + printable(key), path, key);
    }
  }

  const std::string label_;
};

}  // namespace

const KnownKeys* row_of(const std::string& section, const std::string& key) {
  const auto keys = sections().find(section);
  if (keys == sections().end()) return nullptr;
  const auto row = keys->second.find(key);
  return row == keys->second.end() ? nullptr : row->second;
}

SortedKeys sort_keys(const Json& json, const std::string& label) {
  Sorter sorter(label);
  sorter.keys.acting = json;
  if (json.is_object()) sorter.sort(sorter.keys.acting, "");
  return std::move(sorter.keys);
}

}  // namespace shardbook::engine::internal
