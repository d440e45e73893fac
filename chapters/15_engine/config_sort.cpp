// Checks a file against the table of keys.

#include <algorithm>
#include <map>

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

struct Entry {
  const KnownKeys* row;
  std::string type;
};

/// The names of each section.
using Sections = std::map<std::string, std::map<std::string, Entry>>;

const Sections& sections() {
  static const Sections all = [] {
    Sections found;
    for (const KnownKeys& row : known_keys()) {
      for (const KnownKey& key : keys_of(row)) {
        found[row.section][key.name] = {&row, key.type};
      }
    }
    return found;
  }();
  return all;
}

bool has_rows(const std::string& section) {
  return sections().count(section) > 0;
}

const Entry* entry_of(const std::string& section, const std::string& key) {
  const auto keys = sections().find(section);
  if (keys == sections().end()) return nullptr;
  const auto entry = keys->second.find(key);
  return entry == keys->second.end() ? nullptr : &entry->second;
}

bool is_enabled_inside(const Json& json) {
  if (!json.is_structured()) return false;
  for (const auto& [key, value] : json.items()) {
    if (is_enabled_inside(value)) return true;
    const bool is_off = value == false || value.is_null() || value == 0;
    if (json.is_object() && key == "enabled" && !is_off) return true;
  }
  return false;
}

bool is_harmless(const KnownKeys& row, const Json& value) {
  const std::string harmless = row.harmless;
  if (harmless.empty()) return false;
  if (harmless != "off") return value == Json::parse(harmless);
  return value.is_object() && !is_enabled_inside(value);
}

std::string way_out(const KnownKeys& row) {
  const std::string harmless = row.harmless;
  const bool has_one = std::string(row.why).find("; give") != std::string::npos;
  if (harmless.empty() || has_one) return "";
  const std::string give = harmless == "off" ? R"("enabled": false)" : harmless;
  return harmless == "null" ? "; leave it out"
                            : "; give " + give + ", or leave it out";
}

/// DeepSpeed's classes, whose values have types, drop "auto": the default holds.
/// The sections themselves and /checkpoint belong to no class.
bool drops_auto(const std::string& section, const std::string& type) {
  return !type.empty() && !section.empty() && section != "/checkpoint";
}

/// Why a key is unknown: it is misspelt, or belongs elsewhere.
std::string advice(const std::string& section, const std::string& key,
                   std::string& meant) {
  std::vector<std::string> here;
  for (const auto& [name, entry] : sections().at(section)) {
    if (entry.row->effect != Effect::kGone) here.push_back(name);
  }
  const auto guessed = [&](const std::string& name) {
    meant = section + "/" + name;
    return "did you mean \"" + name + "\"?";
  };
  const std::string typo = json_file::nearest(key, here, 1);
  if (!typo.empty() && typo.size() <= key.size() + 1) return guessed(typo);
  for (const auto& [other, keys] : sections()) {
    const auto row = keys.find(key);
    if (row == keys.end() || row->second.row->effect != Effect::kActs) continue;
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
    const Entry* entry = entry_of(section_of(section), key);
    if (entry == nullptr) {
      fail_unknown(path, section_of(section), key);
      return false;
    }
    const KnownKeys& row = *entry->row;
    if (row.effect == Effect::kGone) {
      fail(path, std::string("DeepSpeed 0.19.8 refuses this key: ") + row.why);
      return false;
    }
    if (row.effect == Effect::kActs) {
      return sort_acting(*entry, section, path, value);
    }
    sort_idle(*entry, section, path, value);
    return false;
  }

  bool sort_acting(const Entry& entry, const std::string& section,
                   const std::string& path, Json& value) {
    note_parameter(section, path);
    if (value == "auto") {
      if (drops_auto(section, entry.type) || path == "/pipeline/stages") {
        keys.defaults.push_back(path);
      } else {
        fail(path,
             "\"auto\" is for front ends, which know a value for some keys, "
             "and none has filled it; give a value");
      }
      return false;
    }
    // A value of another type is its reader's to refuse
    read_value(entry.type, value);
    const bool may_be_null = !entry.type.empty() && entry.type.back() == '?';
    if (is_harmless(*entry.row, value) || (may_be_null && value.is_null())) {
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

  /// A key without effect, or one whose effect is not offered.
  void sort_idle(const Entry& entry, const std::string& section,
                 const std::string& path, Json& value) {
    const KnownKeys& row = *entry.row;
    const bool is_auto = value == "auto" && drops_auto(section, entry.type);
    const std::string allowed = is_auto ? "" : read_value(entry.type, value);
    const bool changes = row.effect == Effect::kChanges;
    if (changes && !is_auto && !is_harmless(row, value)) {
      note_names(value, path);
      fail(path, (value.is_object() ? "" : printable(value) + " ") +
                     "is not offered: " + row.why + way_out(row));
      return;
    }
    note_parameter(section, path);
    if (!allowed.empty()) {
      fail(path, printable(value) + " is not allowed; give " + allowed);
      return;
    }
    note_names(value, path);
    if (row.effect == Effect::kInside) return;
    keys.no_effect.push_back(
        path + ": has no effect here: " +
        (changes ? "this value is what the book does without it" : row.why));
  }

  /// Names and values in a section that has no effect.
  void note_names(Json& value, const std::string& path) {
    if (!value.is_object() || !has_rows(path)) return;
    for (auto& [key, each] : value.items()) {
      if (!key.empty() && key[0] != '_') sort_key(path, key, each);
    }
  }

  void note_parameter(const std::string& section, const std::string& path) {
    if (section == "/optimizer/params" || section == "/scheduler/params") {
      keys.parameters.push_back(path);
    }
  }

  const std::string label_;
};

}  // namespace

const KnownKeys* row_of(const std::string& section, const std::string& key) {
  const Entry* entry = entry_of(section, key);
  return entry == nullptr ? nullptr : entry->row;
}

SortedKeys sort_keys(const Json& json, const std::string& label) {
  Sorter sorter(label);
  sorter.keys.acting = json;
  if (json.is_object()) sorter.sort(sorter.keys.acting, "");
  return std::move(sorter.keys);
}

}  // namespace shardbook::engine::internal
