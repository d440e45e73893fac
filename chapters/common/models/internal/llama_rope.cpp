#include "chapters/common/models/internal/llama_rope.h"

#include <algorithm>

#include "chapters/common/models/internal/config_keys.h"
#include "chapters/common/models/internal/llama_json.h"
#include "core/check.h"
#include "sim/json_object.h"

namespace shardbook {
namespace {

using nlohmann::json;
using namespace config_keys;

constexpr char kOriginal[] = "original_max_position_embeddings";

struct Rope {
  double theta = 0;
  RopeScaling scaling;
};

/// The kind that a dictionary names; "default" where it names none.
std::string kind_in(const json& rope, const std::string& label) {
  std::string kind;
  for (const char* key : {"type", "rope_type"}) {
    const auto found = rope.find(key);
    if (found == rope.end()) continue;
    SB_CHECK(found->is_string(), label, ": \"", key, "\" is ",
             json_file::shown(*found),
             "; give \"default\", \"linear\" or \"llama3\"");
    const std::string here = found->get<std::string>();
    SB_CHECK(kind.empty() || kind == here, label, ": \"type\" is ",
             json_file::shown(json(kind)), ", but \"rope_type\" is ",
             json_file::shown(*found));
    kind = here;
  }
  const bool has_factor = rope.contains("factor") && !rope["factor"].is_null();
  SB_CHECK(!has_factor || (!kind.empty() && kind != "default"), label,
           ": \"factor\" is ", json_file::shown(rope["factor"]),
           ", but there is no rope_type to use it, so transformers ignores it; "
           "give \"rope_type\": \"linear\", or remove the factor");
  return kind.empty() ? "default" : kind;
}

void need(const json& rope, const std::string& label, const std::string& kind,
          const char* key) {
  SB_CHECK(rope.contains(key), label, ": \"", key,
           "\" is missing; it is needed by ", kind);
}

Rope read_one(const json& rope, const std::string& label, double theta,
              std::int64_t positions) {
  SB_CHECK(rope.is_object(), label, " is ", json_file::shown(rope),
           "; give an object, such as {\"rope_type\": \"linear\", \"factor\": "
           "2.0}");
  Rope result;
  result.theta = theta;
  read_positive(rope, label, "rope_theta", &result.theta);
  const std::string kind = kind_in(rope, label);
  SB_CHECK(kind == "default" || kind == "linear" || kind == "llama3", label,
           ": frequencies are scaled by ", json_file::shown(json(kind)),
           ", which is not computed here; give \"default\", \"linear\" or "
           "\"llama3\"");
  RopeScaling& scaling = result.scaling;
  std::vector<std::string> keys = {"rope_theta", "rope_type", "type"};
  if (kind != "default") {
    need(rope, label, kind, "factor");
    read_positive(rope, label, "factor", &scaling.factor);
    keys.push_back("factor");
    scaling.kind = RopeScaling::Kind::kLinear;
  }
  if (kind == "llama3") {
    for (const auto& [key, value] :
         {std::pair{"low_freq_factor", &scaling.low_freq_factor},
          std::pair{"high_freq_factor", &scaling.high_freq_factor}}) {
      need(rope, label, kind, key);
      read_positive(rope, label, key, value);
      keys.push_back(key);
    }
    SB_CHECK(scaling.low_freq_factor < scaling.high_freq_factor, label,
             ": \"low_freq_factor\" is ", scaling.low_freq_factor,
             ", not below \"high_freq_factor\", which is ",
             scaling.high_freq_factor);
    scaling.original_positions = positions;
    read_size(rope, label, kOriginal, &scaling.original_positions);
    keys.push_back(kOriginal);
    scaling.kind = RopeScaling::Kind::kLlama3;
  }
  for (const auto& [key, value] : rope.items()) {
    // transformers writes the keys of all kinds as null
    const bool is_known =
        std::find(keys.begin(), keys.end(), key) != keys.end() ||
        value.is_null();
    // The number is of no use to the other kinds
    const bool is_idle = key == kOriginal;
    const bool turns_all = key == "partial_rotary_factor" && value == 1;
    SB_CHECK(is_known || is_idle || turns_all, label, ": \"",
             json_file::printable(key), "\" is ", json_file::shown(value),
             ", which has no effect here; remove it if it changes nothing");
  }
  return result;
}

bool are_equal(const Rope& a, const Rope& b) {
  return a.theta == b.theta &&
         rope_to_json(a.scaling) == rope_to_json(b.scaling);
}

}  // namespace

void read_rope(const json& object, const std::string& label, double theta,
               ModelConfig& config) {
  LlamaConfig& llama = config.llama;
  const auto outer = object.find("rope_theta");
  const bool is_null = outer != object.end() && outer->is_null();
  if (is_null) {
    theta = 0;
  } else {
    read_positive(object, label, "rope_theta", &theta);
  }
  Rope rope;
  rope.theta = theta;
  bool is_first = true;
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const auto found = object.find(key);
    if (found == object.end() || found->is_null() || *found == json::object()) {
      continue;
    }
    const Rope here = read_one(*found, label + ": \"" + key + "\"", theta,
                               config.n_positions);
    SB_CHECK(is_first || are_equal(here, rope), label,
             ": \"rope_scaling\" and \"rope_parameters\" differ; transformers "
             "takes rope_scaling: remove one of them");
    rope = here;
    is_first = false;
  }
  SB_CHECK(rope.theta > 0, label,
           ": \"rope_theta\" is null; give a number, such as 10000.0");
  llama.rope_theta = rope.theta;
  llama.rope = rope.scaling;
  if (llama.rope.kind == RopeScaling::Kind::kLlama3) {
    // Beside the dictionary, versions of transformers understand it differently
    check_fixed(object, label,
                {kOriginal,
                 {llama.rope.original_positions},
                 "the number inside of the RoPE's keys is another"});
  } else {
    std::int64_t unused = 0;
    read_size(object, label, kOriginal, &unused);
  }
}

json rope_to_json(const RopeScaling& rope) {
  if (rope.kind == RopeScaling::Kind::kNone) return nullptr;
  json object = {{"factor", rope.factor}};
  if (rope.kind == RopeScaling::Kind::kLinear) {
    object["rope_type"] = "linear";
    return object;
  }
  object.update({{"rope_type", "llama3"},
                 {"low_freq_factor", rope.low_freq_factor},
                 {"high_freq_factor", rope.high_freq_factor},
                 {kOriginal, rope.original_positions}});
  return object;
}

}  // namespace shardbook
