#include "chapters/common/models/internal/config_keys.h"

#include <algorithm>
#include <map>

#include "chapters/common/models/data.h"
#include "core/check.h"
#include "sim/json_object.h"

namespace shardbook::config_keys {

using nlohmann::json;

namespace {

/// A text with quotes around the values that Python's json writes and JSON lacks.
struct QuotedValues {
  explicit QuotedValues(const std::string& given) {
    std::size_t copied = 0;
    for (std::size_t i = 0; i < given.size(); ++i) {
      if (given[i] == '"') {
        for (++i; i < given.size() && given[i] != '"'; ++i) {
          if (given[i] == '\\') ++i;
        }
        continue;
      }
      for (const std::string word : {"Infinity", "-Infinity", "NaN"}) {
        if (given.compare(i, word.size(), word) != 0) continue;
        const std::size_t end = i + word.size();
        const std::size_t next = given.find_first_not_of(" \t\r\n", end);
        // A name has to have quotes of its own
        if (next != std::string::npos && given[next] == ':') continue;
        text.append(given, copied, i - copied).append('"' + word + '"');
        ends.push_back(text.size());
        copied = end;
        i = end - 1;
        break;
      }
    }
    text.append(given, copied);
  }
  /// Of the given text.
  std::size_t byte(std::size_t of_text) const {
    const auto before = std::lower_bound(ends.begin(), ends.end(), of_text);
    return of_text - 2 * static_cast<std::size_t>(before - ends.begin());
  }

  std::string text;
  std::vector<std::size_t> ends;
};

}  // namespace

json parse_config(const std::string& text, const std::string& label) {
  SB_CHECK(text.size() <= kMostBytes, label, ": longer than 8 MiB");
  const std::string problem = utf8_problem(text);
  SB_CHECK(problem.empty(), label, ": ", problem);
  json_file::check_depth(text, label);
  const QuotedValues quoted(text);
  json object;
  try {
    object = json::parse(quoted.text);
  } catch (const json::parse_error& error) {
    SB_FAIL(label, ": not JSON (byte ", quoted.byte(error.byte), ")");
  } catch (const json::out_of_range&) {
    SB_FAIL(label, ": a number is too large; give numbers below 1.8e308");
  }
  SB_CHECK(object.is_object(), label, ": not a JSON object");
  return object;
}

void read_size(const json& object, const std::string& label, const char* key,
               std::int64_t* value, std::int64_t most) {
  if (!object.contains(key)) return;
  SB_CHECK(
      object[key].is_number_integer() && object[key] > 0 && object[key] <= most,
      label, ": \"", key, "\" is ", json_file::shown(object[key]),
      "; give a positive integer, at most ", most);
  *value = object[key].get<std::int64_t>();
}

void read_fraction(const json& object, const std::string& label,
                   const char* key, double* value) {
  if (!object.contains(key)) return;
  SB_CHECK(object[key].is_number() && object[key] >= 0 && object[key] < 1,
           label, ": \"", key, "\" is ", json_file::shown(object[key]),
           "; give a number from 0 to below 1");
  *value = object[key].get<double>();
}

void read_positive(const json& object, const std::string& label,
                   const char* key, double* value) {
  if (!object.contains(key)) return;
  SB_CHECK(object[key].is_number() && object[key] > 0 && object[key] <= 1e30,
           label, ": \"", key, "\" is ", json_file::shown(object[key]),
           "; give a number above 0, at most 1e30");
  *value = object[key].get<double>();
}

void read_flag(const json& object, const std::string& label, const char* key,
               bool* value) {
  if (!object.contains(key)) return;
  SB_CHECK(object[key].is_boolean(), label, ": \"", key, "\" is ",
           json_file::shown(object[key]), "; give true or false");
  *value = object[key].get<bool>();
}

void check_fixed(const json& object, const std::string& label,
                 const FixedKey& fixed) {
  const auto found = object.find(fixed.key);
  if (found == object.end()) return;
  const auto& good = fixed.values;
  SB_CHECK(std::find(good.begin(), good.end(), *found) != good.end(), label,
           ": \"", fixed.key, "\" is ", json_file::shown(*found), ", but ",
           fixed.reason, "; give ", good.front().dump());
}

namespace {

/// Names of the keys in other programs.
const std::map<std::string, std::string>& other_names() {
  static const std::map<std::string, std::string> kNames = {
      {"block_size", "n_positions"},
      {"context_length", "n_positions"},
      {"max_seq_len", "n_positions"},
      {"seq_length", "n_positions"},
      {"emb_dim", "n_embd"},
      {"embed_dim", "n_embd"},
      {"d_model", "n_embd"},
      {"num_layers", "n_layer"},
      {"num_heads", "n_head"},
      {"layer_norm_eps", "layer_norm_epsilon"},
      {"intermediate_size", "n_inner"},
      {"num_classes", "num_labels"}};
  return kNames;
}

bool is_in(const std::vector<std::string>& keys, const std::string& key) {
  return std::find(keys.begin(), keys.end(), key) != keys.end();
}

/// "a, b, c and 2 more"
std::string first_of(const std::vector<std::string>& parts) {
  constexpr std::size_t kShown = 5;
  std::string list;
  for (std::size_t i = 0; i < std::min(parts.size(), kShown); ++i) {
    list += (i == 0 ? "" : ", ") + parts[i];
  }
  if (parts.size() <= kShown) return list;
  return list + " and " + std::to_string(parts.size() - kShown) + " more";
}

}  // namespace

void check_keys(const json& object, const std::string& label,
                std::vector<std::string> read,
                const std::vector<FixedKey>& fixed,
                const std::vector<std::string>& sizes,
                const std::vector<std::string>& harmless, const char* model) {
  // Each unknown one is compared with all that are known
  constexpr std::size_t kMostKeys = 1000;
  SB_CHECK(object.size() <= kMostKeys, label, ": has ", object.size(),
           " keys; give at most ", kMostKeys);
  for (const FixedKey& each : fixed) read.push_back(each.key);
  read.insert(read.end(), sizes.begin(), sizes.end());
  std::string list;
  bool is_sized = false;
  for (const std::string& size : sizes) {
    is_sized = is_sized || object.contains(size);
    list += (list.empty() ? "" : ", ") + size;
  }
  std::vector<std::string> misspelt, unknown;
  for (const auto& [key, value] : object.items()) {
    if (is_in(read, key) || is_in(harmless, key) ||
        is_in(keys_without_effect(), key) || is_in(keys_of_generation(), key) ||
        key.rfind('_', 0) == 0) {
      continue;
    }
    const std::string shown = "\"" + json_file::printable(key) + "\"";
    const auto other = other_names().find(key);
    const std::string meant = other != other_names().end()
                                  ? other->second
                                  : json_file::nearest(key, read, 2);
    if (is_in(read, meant)) {
      misspelt.push_back(shown + " (did you mean \"" + meant + "\"?)");
    } else {
      unknown.push_back(shown + " is " + json_file::shown(value));
    }
  }
  SB_CHECK(misspelt.empty(), label,
           ": these keys are not read: ", first_of(misspelt),
           "; the sizes are ", list);
  SB_CHECK(is_sized, label, ": has no size of the model; the sizes are ", list);
  SB_CHECK(unknown.empty(), label, ": ", first_of(unknown),
           ": not followed here, where the model is ", model,
           "; remove what changes nothing in it");
}

void check_architecture(const json& object, const std::string& label,
                        const std::vector<std::string>& names) {
  FixedKey key = {"architectures", {}, "the model here is another"};
  for (const std::string& name : names)
    key.values.push_back(json::array({name}));
  key.values.insert(key.values.end(), {nullptr, json::array()});
  check_fixed(object, label, key);
}

}  // namespace shardbook::config_keys
