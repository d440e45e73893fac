// Whatever the text of an engine's config is, reading it ends in a config that is
// written and read again alike, or in an Error that names the file and can be
// read. No key of the text is passed over: it acts, or a remark names it.

#include <algorithm>
#include <cmath>
#include <iterator>
#include <nlohmann/json.hpp>
#include <sstream>

#include "chapters/15_engine/deepspeed_config.h"
#include "chapters/15_engine/internal/deepspeed_keys.h"
#include "core/check.h"
#include "sim/json_object.h"
#include "tests/fuzz/fuzz.h"

namespace {

using shardbook::check_message;
using shardbook::kFuzzedInput;
using shardbook::promise;
using shardbook::read_or_refuse;
using shardbook::engine::BatchSizes;
using shardbook::engine::DeepSpeedConfig;

void check_batch(const BatchSizes& given) {
  for (const std::int64_t dp : {1, 3, 65536}) {
    read_or_refuse(
        [&] {
          const BatchSizes all = resolve_batch(given, dp);
          promise(all.micro > 0 && all.accumulation > 0);
          promise(all.train == all.micro * all.accumulation * dp);
        },
        /*max_size=*/1000, "");
  }
}

/// A line for each mistake.
void check_messages(const std::string& messages, const std::string& label) {
  std::istringstream lines(messages);
  int count = 0;
  for (std::string line; std::getline(lines, line); ++count) {
    check_message(line, label);
  }
  promise(count >= 1 && count <= 21);
}

bool is_named(const DeepSpeedConfig& config, const std::string& path) {
  const auto begins = [&](const std::string& remark) {
    return remark.rfind(path + ":", 0) == 0 || remark.rfind(path + " ", 0) == 0;
  };
  return std::find(config.acts.begin(), config.acts.end(), path) !=
             config.acts.end() ||
         std::any_of(config.remarks.begin(), config.remarks.end(), begins);
}

void check_keys(const nlohmann::json& json, const std::string& path,
                const DeepSpeedConfig& config) {
  for (const auto& [key, value] : json.items()) {
    const std::string here = path + "/" + key;
    if (key[0] == '_' || is_named(config, here)) continue;
    promise(value.is_object());
    check_keys(value, here, config);
  }
}

/// Adds one key of the table, which the size of the text chooses.
void check_added_key(nlohmann::json json, std::size_t choice) {
  const auto& rows = shardbook::engine::internal::known_keys();
  const auto& row = rows[choice % rows.size()];
  std::istringstream keys(row.keys);
  const std::vector<std::string> names{std::istream_iterator<std::string>(keys),
                                       {}};
  const std::string path =
      std::string(row.section) + "/" + names[choice / 7 % names.size()];
  const std::vector<nlohmann::json> values = {
      true,   false,  0,
      2,      0.5,    nullptr,
      "auto", "fp32", nlohmann::json::object()};
  try {
    json[nlohmann::json::json_pointer(path)] = values[choice % values.size()];
    const std::string text = json.dump();
    check_keys(json, "", DeepSpeedConfig::parse(text, kFuzzedInput));
  } catch (const shardbook::Error& error) {
    check_messages(error.what(), kFuzzedInput);
  } catch (const nlohmann::json::exception&) {
    // A section is no object
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data,
                                      std::size_t size) {
  const std::string text = shardbook::text_of(data, size);
  try {
    const auto config = DeepSpeedConfig::parse(text, kFuzzedInput);
    const std::string written = config.to_json();
    promise(DeepSpeedConfig::parse(written, kFuzzedInput).to_json() == written);
    const auto json = shardbook::json_file::parse_json(
        shardbook::json_file::plain_json(text), kFuzzedInput);
    check_keys(json, "", config);
    const std::size_t last = size > 0 ? data[size / 2] : 0;
    check_added_key(json, 31 * size + last);
    promise(
        DeepSpeedConfig::parse(config.explained(), kFuzzedInput).to_json() ==
        written);
    promise(config.zero.stage >= 0 && config.zero.stage <= 3);
    promise(std::isfinite(config.optimizer.params.lr));
    check_batch(config.batch);
  } catch (const shardbook::Error& error) {
    check_messages(error.what(), kFuzzedInput);
  }
  read_or_refuse([&] {
    shardbook::engine::fill_auto(text, kFuzzedInput,
                                 {{"/train_batch_size", {"16", "--batch"}},
                                  {"/gradient_accumulation_steps", {}},
                                  {"/optimizer/params/lr", {"0.1", "--lr"}}});
  });
  return 0;
}

std::vector<std::string> shardbook::fuzz_seeds() {
  return {
      "",
      "{}",
      R"({"train_batch_size": 16, "optimizer": {"type": "Adam", "params":
          {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8}},
          "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps":
          1000}}, "gradient_clipping": 1.0, "fp16": {"enabled": true,
          "initial_scale_power": 15}, "zero_optimization": {"stage": 2,
          "reduce_bucket_size": 5e7, "cpu_offload": true}})",
      R"({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps":
          8, "bf16": {"enabled": true}, "pipeline": {"stages": 4},
          "shardbook": {"tensor_parallel": {"size": 2}, "experts":
          {"num_experts": [2, 4]}}})",
      R"({"optimizer": {"type": "SGD", "params": {"momentum": 0.9, "nesterov":
          true}}, "scheduler": {"type": "WarmupDecayLR", "params":
          {"total_num_steps": 8, "warmup_num_steps": 4}}, "train_batch_size":
          "auto"})",
      R"({"zero_optimization": {"stage": 3, "max_live_parameters": 0,
          "zero_quantized_weights": false, "overlap_comm": "auto", # comment
          "offload_param": null,}, "tensorboard": {"enabled": true},
          "bfloat16": {"enabled": "auto"}, "sparse_gradients": false,
          "activation_checkpointing": {"number_checkpoints": 4}, // another
          "data_types": {"grad_accum_dtype": "fp32"}, /* and one */
          "optimizer": {"type": "adam", "params": {"torch_adam": true}}})"};
}
