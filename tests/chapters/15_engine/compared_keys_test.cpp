// Which keys of a config a run shares with the one that it continues: all that
// act, unless the table of keys has a reason.

#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "chapters/15_engine/internal/deepspeed_keys.h"
#include "chapters/15_engine/strategies.h"

namespace shardbook::engine {
namespace {

using nlohmann::json;
using Shared = std::map<std::string, std::string>;

/// Every key with a value, and each choice of keys that exclude each other in
/// one of two files.
json full(const std::string& optimizer) {
  json file = json::parse(R"({
    "train_batch_size": 8, "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2, "steps_per_print": 3,
    "gradient_clipping": 0.5, "communication_data_type": "fp32",
    "seq_parallel_communication_data_type": "fp32",
    "data_types": {"grad_accum_dtype": "fp32"}, "fp16": {"enabled": true},
    "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": true,
    "scheduler": {"type": "WarmupDecayLR",
                  "params": {"total_num_steps": 2000}},
    "shardbook": {"experts": {"num_experts": 4}}})");
  file["optimizer"] = {{"type", optimizer}, {"params", {{"lr", 0.5}}}};
  return file;
}

/// What a run of a config shares with the one that it continues, by name: the
/// keys, and the options that the config fills.
Shared shared_by(const DeepSpeedConfig& config) {
  Options options;
  CommandLine line("shared", "");
  add_shared_options(line, options);
  apply_config(config, /*dp=*/1, {}, options);
  Shared all;
  for (const auto& each : {line.compared(), options.compared}) {
    for (const ComparedOption& option : each) all[option.name] = option.value;
  }
  return all;
}

DeepSpeedConfig parsed(const json& file) {
  return DeepSpeedConfig::parse(file.dump(), "ds.json");
}

/// What is shared with another value at a path; nothing where no other value is
/// allowed beside the others.
std::optional<Shared> with_another(const json& file, const std::string& path) {
  static const std::map<std::string, json> kOthers = {
      {"warmup_type", "linear"},
      {"device", "cpu"},
      {"mode", "2d"},
      {"kind", "rsa"},
      {"layout", "zigzag"},
      {"schedule", "gpipe"},
      {"recompute", "blocks"},
      {"sharding", "fsdp"},
      {"partition", "parameters"},
      {"noisy_gate_policy", "RSample"},
      {"betas", {0.5, 0.75}},
      {"num_experts", {2}}};
  const json::json_pointer at(path);
  const json& now = file[at];
  const auto other = kOthers.find(at.back());
  std::vector<json> others = {"bf16"};
  if (now.is_boolean()) others = {!now.get<bool>()};
  if (now.is_number()) others = {now.get<double>() / 2, 2, 1};
  if (other != kOthers.end()) others = {other->second};
  for (const json& value : others) {
    json next = file;
    next[at] = value;
    try {
      if (next != file) return shared_by(parsed(next));
    } catch (const Error&) {
    }
  }
  return std::nullopt;
}

/// The paths of all keys that are no sections.
std::vector<std::string> leaves(const json& file, const std::string& path) {
  std::vector<std::string> all;
  for (const auto& [key, value] : file.items()) {
    const std::string at = path + "/" + key;
    if (!value.is_object()) {
      all.push_back(at);
      continue;
    }
    for (const std::string& each : leaves(value, at)) all.push_back(each);
  }
  return all;
}

TEST(ComparedKeys, AreAllThatCanChangeNumbers) {
  int compared = 0, excused = 0;
  for (const char* optimizer : {"Adam", "SGD"}) {
    const DeepSpeedConfig usual = parsed(full(optimizer));
    const json file = json::parse(usual.to_json());
    const Shared before = shared_by(usual);
    for (const std::string& path : leaves(file, "")) {
      if (path == "/optimizer/type") continue;  // AdamW is Adam's other name
      const std::optional<Shared> other = with_another(file, path);
      if (!other) continue;
      const std::size_t slash = path.rfind('/');
      const internal::KnownKeys* row =
          internal::row_of(path.substr(0, slash), path.substr(slash + 1));
      ASSERT_NE(row, nullptr) << path;
      const std::string why = row->why;
      const bool is_option =
          why.rfind("it is -", 0) == 0 || why.rfind("they are ", 0) == 0;
      const bool differs = *other != before;
      EXPECT_EQ(differs, why.empty() || is_option) << path << ": " << why;
      (differs ? compared : excused) += 1;
    }
  }
  EXPECT_GT(compared, 30);
  EXPECT_GT(excused, 20);
}

}  // namespace
}  // namespace shardbook::engine
