#include "chapters/common/models/internal/counted_json.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <set>
#include <utility>

#include "chapters/common/models/internal/config_keys.h"
#include "chapters/common/models/internal/counted_families.h"
#include "core/check.h"
#include "sim/json_object.h"

namespace shardbook {
namespace {

using counted_families::CountedClass;
using counted_families::Number;
using nlohmann::json;

constexpr std::size_t kMostLayers = 1 << 14;

/// Larger than any that fits; they keep products of sizes below 2^63.
std::int64_t most_of(const std::string& name) {
  if (name == "lns") return 2;
  for (const char* few :
       {"layers", "heads", "kv", "groups", "experts", "shared_number",
        "full_kv", "global_kv", "index_heads", "most_experts"}) {
    if (name == few) return kMostLayers;
  }
  return config_keys::kMostOfASize;
}

std::int64_t least_of(const std::string& name) {
  if (name == "last") return -1;
  for (const char* zero :
       {"shared", "shared_number", "window", "most", "before", "first", "from",
        "until", "q_rank", "pattern", "shared_kv", "per_layer",
        "index_offset"}) {
    if (name == zero) return 0;
  }
  return 1;
}

/// "attn_config": {"kv_n_heads": 8} as "attn_config.kv_n_heads": 8, where the
/// class has keys of this kind.
json flattened(const json& object, const std::set<std::string>& known) {
  json flat = json::object();
  for (const auto& [key, value] : object.items()) {
    const auto inner = known.lower_bound(key + ".");
    if (value.is_object() && inner != known.end() &&
        inner->rfind(key + ".", 0) == 0) {
      for (const auto& [name, each] : value.items()) {
        flat[key + "." + name] = each;
      }
    } else {
      flat[key] = value;
    }
  }
  return flat;
}

std::set<std::string> keys_of(const CountedClass& family) {
  std::set<std::string> keys;
  for (const auto& [name, number] : family.numbers) {
    keys.insert(number.keys.begin(), number.keys.end());
  }
  for (const auto& [key, value] : family.fixed) keys.insert(key);
  keys.insert(family.idle.begin(), family.idle.end());
  return keys;
}

/// Keys that change no count, in any class.
const std::set<std::string>& keys_without_count() {
  static const std::set<std::string> kKeys = [] {
    std::set<std::string> all = {"model_type"};
    for (const auto& keys :
         {counted_families::keys_passed_over(),
          counted_families::keys_of_training(),
          config_keys::keys_without_effect(), config_keys::keys_of_generation(),
          config_keys::harmless_in_gpt(), config_keys::harmless_in_llama()}) {
      all.insert(keys.begin(), keys.end());
    }
    return all;
  }();
  return kKeys;
}

/// Keys with which other classes say what their layers are.
const std::set<std::string>& keys_of_others() {
  static const std::set<std::string> kKeys = [] {
    std::set<std::string> all;
    for (const std::string& type : counted_families::types()) {
      all.merge(keys_of(counted_families::family_of(type)));
    }
    return all;
  }();
  return kKeys;
}

/// One file, read by the row of its class.
class Reading {
 public:
  Reading(const json& object, std::string label, const CountedClass& family)
      : family_(family),
        known_(keys_of(family)),
        object_(flattened(object, known_)),
        label_(std::move(label)) {
    check_keys();
    // With a list of its layers, EXAONE has "LLLG" as a pattern
    if (!list("types").is_null()) values_["pattern"] = 0;
  }

  /// By the file, or else by the class.
  std::int64_t operator[](const std::string& name) {
    const auto done = values_.find(name);
    if (done != values_.end()) return done->second;
    const auto number = family_.numbers.find(name);
    SB_CHECK(number != family_.numbers.end(), "\"", name, "\" is no number of ",
             family_.type);
    const std::int64_t value = read(name, number->second);
    values_[name] = value;
    return value;
  }

  /// All that are no lists.
  std::map<std::string, std::int64_t> numbers() {
    for (const auto& [name, number] : family_.numbers) {
      if (!is_list(name)) (*this)[name];
    }
    return values_;
  }
  /// The list under a name's key; null where there is none.
  json list(const std::string& name) const {
    const auto number = family_.numbers.find(name);
    if (number == family_.numbers.end()) return {};
    const json* const found = find(name);
    if (found == nullptr || found->is_null()) {
      const std::string& absent = number->second.absent;
      return absent.empty() ? json() : json::parse(absent);
    }
    SB_CHECK(found->is_array() && found->size() <= kMostLayers, label_, ": ",
             shown(name), "; give a list of at most ", kMostLayers);
    return *found;
  }
  /// The same, of numbers of layers.
  std::set<std::int64_t> layers(const std::string& name) const {
    std::set<std::int64_t> numbers;
    for (const json& each : list(name)) {
      SB_CHECK(each.is_number_integer(), label_, ": ", shown(name),
               "; give numbers of layers");
      numbers.insert(each.get<std::int64_t>());
    }
    return numbers;
  }
  /// For messages: "layer_types" is ["x"]
  std::string shown(const std::string& name) const {
    const std::string& key = given_key(name);
    if (key.empty()) {
      return "\"" + family_.numbers.at(name).keys[0] + "\" is absent";
    }
    return "\"" + key + "\" is " + json_file::shown(object_.at(key));
  }
  const std::string& label() const { return label_; }

 private:
  static bool is_list(const std::string& name) {
    return name == "types" || name.find("_list") != std::string::npos;
  }
  const std::string& given_key(const std::string& name) const {
    static const std::string kNone;
    const auto number = family_.numbers.find(name);
    if (number == family_.numbers.end()) return kNone;
    for (const std::string& key : number->second.keys) {
      if (object_.contains(key)) return key;
    }
    return kNone;
  }
  const json* find(const std::string& name) const {
    const std::string& key = given_key(name);
    return key.empty() ? nullptr : &object_.at(key);
  }

  void check_keys() {
    for (const auto& [key, value] : object_.items()) {
      if (known_.count(key) > 0 || keys_without_count().count(key) > 0 ||
          key.rfind('_', 0) == 0) {
        continue;
      }
      const bool is_off = value.is_null() || value == false || value == 0 ||
                          value == json::array();
      if (keys_of_others().count(key) > 0) {
        SB_CHECK(is_off, label_, ": \"", json_file::printable(key), "\" is ",
                 json_file::shown(value), ", and a ", family_.type,
                 " has no such key in transformers; remove it");
        continue;
      }
      const std::vector<std::string> names(known_.begin(), known_.end());
      const std::string near = json_file::nearest(key, names, 2);
      SB_FAIL(label_, ": \"", json_file::printable(key), "\" is ",
              json_file::shown(value), ", a key whose effect on a ",
              family_.type, " is not known",
              near.empty() ? "; remove what changes nothing in it"
                           : " (did you mean \"" + near + "\"?)");
    }
    for (const auto& [key, text] : family_.fixed) {
      const auto found = object_.find(key);
      if (found == object_.end()) continue;
      const bool is_list = text.rfind("each:", 0) == 0;
      const std::size_t end = text.find('|');
      std::string good = text.substr(0, end).substr(is_list ? 5 : 0);
      if (good[0] == '=') good = std::to_string(evaluate(good.substr(1)));
      const json value = json::parse(good);
      const auto is_in = [&](const json& each) {
        return std::find(value.begin(), value.end(), each) != value.end();
      };
      const bool is_good =
          (end != std::string::npos && found->is_null()) ||
          (is_list ? found->is_array() &&
                         std::all_of(found->begin(), found->end(), is_in)
                   : *found == value);
      SB_CHECK(is_good, label_, ": \"", key, "\" is ", json_file::shown(*found),
               ", and a ", family_.type, " is counted with ",
               is_list ? "elements of " : "", good, " alone");
    }
  }

  std::int64_t read(const std::string& name, const Number& number) {
    const json* const found = find(name);
    if (found == nullptr) {
      SB_CHECK(!number.absent.empty(), label_, ": a ", family_.type,
               " needs \"", number.keys[0],
               "\", for which its class has no default");
      return evaluate(number.absent);
    }
    for (const std::string& key : number.keys) {
      const auto other = object_.find(key);
      SB_CHECK(other == object_.end() || *other == *found, label_, ": ",
               shown(name), ", but \"", key, "\", another name of it, is ",
               json_file::shown(other == object_.end() ? json() : *other));
    }
    if (found->is_null() && number.may_be_null) return evaluate(number.if_null);
    if (number.is_switch()) {
      SB_CHECK(found->is_boolean(), label_, ": ", shown(name),
               "; give true or false");
      return found->get<bool>() ? 1 : 0;
    }
    const std::int64_t least = least_of(name), most = most_of(name);
    SB_CHECK(found->is_number_integer() && *found >= least && *found <= most,
             label_, ": ", shown(name), "; give an integer from ", least,
             " to ", most);
    return found->get<std::int64_t>();
  }

  std::int64_t evaluate(const std::string& text) {
    return counted_families::evaluate(
        text, [this](const std::string& name) { return (*this)[name]; });
  }

  const CountedClass& family_;
  std::set<std::string> known_;
  json object_;
  std::string label_;
  std::map<std::string, std::int64_t> values_;
};

// --- What the layers are

/// GPT-Neo's [[["global", "local"], 12]]: both, twelve times.
std::vector<std::string> expanded(const json& list, std::size_t layers,
                                  const std::string& problem) {
  std::vector<std::string> names;
  const auto check = [&](bool is_good) { SB_CHECK(is_good, problem); };
  for (const json& each : list) {
    if (each.is_string()) {
      names.push_back(each.get<std::string>());
      continue;
    }
    check(each.is_array() && each.size() == 2 && each[0].is_array() &&
          !each[0].empty() && each[1].is_number_integer() && each[1] >= 0 &&
          each[1] <= static_cast<std::int64_t>(layers));
    for (auto i = each[1].get<std::int64_t>(); i > 0; --i) {
      for (const json& name : each[0]) {
        check(name.is_string() && names.size() < layers);
        names.push_back(name.get<std::string>());
      }
    }
  }
  check(names.size() == layers);
  return names;
}

/// By "layer_types" or "attention_types".
void read_types(Reading& file, std::vector<CountedLayer>& layers) {
  const json list = file.list("types");
  const std::string problem =
      file.label() + ": " + file.shown("types") +
      "; give \"full_attention\" or \"sliding_attention\" for each of " +
      std::to_string(layers.size()) + " layers";
  const auto names = expanded(list, layers.size(), problem);
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const bool slides = names[i] == "sliding_attention" ||
                        names[i] == "local" || names[i] == "chunked_attention";
    SB_CHECK(slides || names[i] == "full_attention" || names[i] == "global",
             problem);
    layers[i].window = slides ? file["window"] : 0;
    SB_CHECK(!slides || file["window"] > 0, file.label(), ": ",
             file.shown("types"),
             ", and the file has no window; give one, or \"full_attention\"");
  }
}

/// True for each element of a list that is `yes`, false for `no`.
std::vector<bool> choices(Reading& file, const std::string& list,
                          std::size_t layers, const char* yes, const char* no) {
  std::vector<bool> chosen;
  const json names = file.list(list);
  bool is_good = names.is_null() || names.size() == layers;
  for (const json& name : names) {
    chosen.push_back(name == yes);
    is_good = is_good && (name == yes || name == no);
  }
  SB_CHECK(is_good, file.label(), ": ", file.shown(list), "; give \"", yes,
           "\" or \"", no, "\" for each of ", layers, " layers");
  return chosen;
}

void read_indexers(Reading& file, std::vector<CountedLayer>& layers) {
  if (file["index_heads"] == 0) return;
  const auto listed =
      choices(file, "index_list", layers.size(), "full", "shared");
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const auto after = static_cast<std::int64_t>(i) - file["index_offset"] + 1;
    layers[i].has_indexer = listed.empty()
                                ? after <= 0 || after % file["index_step"] == 0
                                : listed[i];
  }
  SB_CHECK(layers[0].has_indexer, file.label(), ": ",
           file.shown(listed.empty() ? "index_offset" : "index_list"),
           "; the first layer needs an indexer, as there is no earlier one");
}

void share_keys(Reading& file, std::vector<CountedLayer>& layers) {
  const std::int64_t shared = file["shared_kv"];
  const auto own = static_cast<std::ptrdiff_t>(layers.size()) - shared;
  SB_CHECK(own > 0, file.label(), ": ", file.shown("shared_kv"),
           ", and there are ", layers.size(), " layers; give fewer");
  for (auto layer = layers.begin() + own; layer != layers.end(); ++layer) {
    layer->shares_keys = true;
    SB_CHECK(std::any_of(layers.begin(), layers.begin() + own,
                         [&](const CountedLayer& each) {
                           return each.window == layer->window;
                         }),
             file.label(), ": ", file.shown("shared_kv"),
             ", and no earlier layer has attention of the kind of layer ",
             layer - layers.begin());
  }
}

/// Lists that the class passes over have to say what its layers are.
void check_stated(const Reading& file,
                  const std::vector<CountedLayer>& layers) {
  const auto check = [&](const std::string& name, const auto& is_in) {
    const json list = file.list(name);
    if (list.is_null()) return;
    bool agrees = list.size() == layers.size();
    for (std::size_t i = 0; agrees && i < layers.size(); ++i)
      agrees = list[i] == (is_in(layers[i]) ? 1 : 0);
    SB_CHECK(agrees, file.label(), ": ", file.shown(name),
             ", which transformers passes over, and its layers are others");
  };
  check("stated_slide_list",
        [](const CountedLayer& layer) { return layer.window > 0; });
  check("stated_expert_list",
        [](const CountedLayer& layer) { return layer.has_experts; });
}

std::vector<CountedLayer> layers_of(Reading& file) {
  const std::int64_t count = file["layers"];
  std::vector<CountedLayer> layers(static_cast<std::size_t>(count));
  const std::int64_t last = file["last"] < 0 ? count - 1 : file["last"];
  const bool has_list = !file.list("expert_list").is_null();
  const auto with_experts = file.layers("expert_list"),
             dense = file.layers("dense_list");
  const json slide_list = file.list("slide_list");
  SB_CHECK(slide_list.empty() || slide_list.size() == layers.size(),
           file.label(), ": \"no_rope_layers\" has ", slide_list.size(),
           " layers, and there are ", count);
  const bool has_types = !file.list("types").is_null();
  const auto sparse =
      choices(file, "sparse_list", layers.size(), "sparse", "dense");
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const auto index = static_cast<std::int64_t>(i);
    layers[i].has_experts = has_list
                                ? with_experts.count(index) > 0
                                : index >= file["first"] && index <= last &&
                                      (index + 1) % file["step"] == 0;
    if (!sparse.empty()) layers[i].has_experts = sparse[i];
    layers[i].has_experts =
        layers[i].has_experts && file["experts"] > 0 && dense.count(index) == 0;
    if (has_types) continue;
    const std::int64_t pattern = file["pattern"];
    const bool slides = slide_list.empty()
                            ? index >= file["from"] && index < file["until"] &&
                                  (pattern == 0 || (index + 1) % pattern != 0)
                            : slide_list[i] != 0;
    layers[i].window = slides ? file["window"] : 0;
  }
  if (has_types) read_types(file, layers);
  if (file["last_full"] != 0) layers.back().window = 0;
  read_indexers(file, layers);
  share_keys(file, layers);
  check_stated(file, layers);
  return layers;
}

void check_sizes(Reading& file) {
  SB_CHECK(file["heads"] % file["kv"] == 0, file.label(), ": ", file["kv"],
           " heads of keys do not divide ", file["heads"], " of queries");
  SB_CHECK(file["head"] > 0, file.label(), ": a hidden size of ",
           file["hidden"], " leaves no width to ", file["heads"],
           " heads; give more of it, or head_dim");
  SB_CHECK(
      file["square"] == 0 || file["heads"] * file["head"] == file["hidden"],
      file.label(), ": ", file["heads"], " heads of width ", file["head"],
      " are not as wide as the hidden size, ", file["hidden"],
      ", as in this class they have to be");
  SB_CHECK(file["full_kv"] > 0 && file["heads"] % file["full_kv"] == 0,
           file.label(), ": ", file["full_kv"], " heads of keys do not divide ",
           file["heads"], " of queries in layers without a window");
  SB_CHECK(
      file["beside"] == 0 ||
          (file["experts"] > 0 && file["chosen"] > 0 && file["expert"] > 0),
      file.label(), ": ", file.shown("beside"),
      ", and num_experts, top_k_experts or the experts' width is not given");
  SB_CHECK(file["chosen"] <= file["experts"], file.label(), ": ",
           file["chosen"], " experts per token, and there are ",
           file["experts"]);
}

}  // namespace

CountedSizes counted_sizes(const json& object, const std::string& label,
                           const std::string& type) {
  Reading file(object, label, counted_families::family_of(type));
  check_sizes(file);
  return {file.numbers(), layers_of(file)};
}

}  // namespace shardbook
