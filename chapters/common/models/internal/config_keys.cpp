#include "chapters/common/models/internal/config_keys.h"

#include <algorithm>
#include <map>

#include "core/check.h"
#include "sim/json_object.h"

namespace shardbook::config_keys {

using nlohmann::json;

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

}  // namespace

void check_keys(const json& object, const std::string& label,
                std::vector<std::string> read,
                const std::vector<FixedKey>& fixed,
                const std::vector<std::string>& sizes) {
  for (const FixedKey& each : fixed) read.push_back(each.key);
  read.insert(read.end(), sizes.begin(), sizes.end());
  const auto is_read = [&](const std::string& key) {
    return std::find(read.begin(), read.end(), key) != read.end();
  };
  std::string list, wrong;
  bool is_sized = false;
  for (const std::string& size : sizes) {
    is_sized = is_sized || object.contains(size);
    list += (list.empty() ? "" : ", ") + size;
  }
  for (const auto& [key, value] : object.items()) {
    if (is_read(key) || key.rfind('_', 0) == 0) continue;
    const auto other = other_names().find(key);
    const std::string meant = other != other_names().end()
                                  ? other->second
                                  : json_file::nearest(key, read, 2);
    if (!is_read(meant)) continue;
    wrong += (wrong.empty() ? "" : ", ") + ("\"" + json_file::printable(key)) +
             "\" (did you mean \"" + meant + "\"?)";
  }
  SB_CHECK(wrong.empty(), label, ": these keys are not read: ", wrong,
           "; the sizes are ", list);
  SB_CHECK(is_sized, label, ": has no size of the model; the sizes are ", list);
}

}  // namespace shardbook::config_keys
