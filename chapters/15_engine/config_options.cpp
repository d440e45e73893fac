// The command line and a config: options fill "auto", and the config fills the
// options that all chapters share.

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "chapters/15_engine/engine.h"
#include "chapters/15_engine/internal/config_rules.h"
#include "chapters/15_engine/strategies.h"
#include "chapters/common/models/models.h"
#include "core/check.h"
#include "sim/json_object.h"

namespace shardbook::engine {
namespace {

bool is_given(const Given& given, const std::string& option) {
  return std::any_of(given.begin(), given.end(),
                     [&](const auto& each) { return each.first == option; });
}

}  // namespace

void apply_config(const DeepSpeedConfig& config, int dp, const Given& given,
                  Options& options) {
  // An option and a key that differ exclude each other
  const auto refuse = [&](const std::string& flag, const std::string& key) {
    for (const auto& [name, text] : given) {
      SB_CHECK(name != flag, flag, " ", text, ": ", config.label, " has ", key,
               "; leave one of them out");
    }
  };
  const auto fill = [&](const char* flag, auto& option, const std::string& key,
                        const auto& value) {
    if (option == value) return;
    refuse(flag, key + fmt::format(" {}", value));
    option = value;
  };
  if (config.batch.train > 0 || config.batch.micro > 0) {
    const BatchSizes sizes = resolve_batch(config.batch, dp);
    fill("--batch", options.batch,
         config.batch.train > 0
             ? "/train_batch_size"
             : "/train_micro_batch_size_per_gpu for a batch of",
         sizes.train);
  }
  const OptimizerConfig& optimizer = config.optimizer;
  if (!optimizer.type.empty()) {
    OptimizerOptions& to = options.optimizer_options;
    const OptimizerOptions& from = optimizer.params;
    const std::string params = "/optimizer/params/";
    fill("--optimizer", options.optimizer, "/optimizer/type for",
         optimizer.name());
    fill("--lr", to.lr, params + "lr", from.lr);
    fill("--weight-decay", to.weight_decay, params + "weight_decay",
         from.weight_decay);
    fill("--momentum", to.momentum, params + "momentum", from.momentum);
    fill("--nesterov", to.nesterov, params + "nesterov", from.nesterov);
    fill("--beta1", to.beta1, params + "betas with", from.beta1);
    fill("--beta2", to.beta2, params + "betas with", from.beta2);
    fill("--eps", to.eps, params + "eps", from.eps);
    to.dampening = from.dampening;
  }
  if (!is_given(given, "--clip")) options.clip = config.gradient_clipping;
  if (!config.scheduler.type.empty()) {
    const std::string key = "/scheduler/type " + config.scheduler.type;
    refuse("--lr-schedule", key);
    if (config.filled_from.count("--warmup") == 0) refuse("--warmup", key);
    OptimizerConfig as_given;
    as_given.params = options.optimizer_options;
    options.rate = schedule_of(config, as_given);
  }
  const DType dtype = config.dtype(options.dtype);
  if (dtype != options.dtype) {
    const std::string key = config.bf16 ? "/bf16/enabled" : "/fp16/enabled";
    refuse("--dtype", key);
    options.dtype = dtype;
  }
  SB_CHECK(options.dtype != DType::kF16 || config.fp16.enabled,
           "--dtype f16: ", config.label,
           " has no /fp16/enabled, which scales the loss; give that in place "
           "of the option");
  if (const auto wire = config.wire()) narrow(options, *wire);
  options.compared = compared_keys(config, options.dtype);
}

// --- "auto", as Hugging Face's Trainer fills it ------------------------------

namespace {

using json_file::Json;

/// Values in place of "auto", from the options.
AutoValues values_of(const Json& json, const Options& options,
                     const Given& given) {
  AutoValues values = internal::auto_values(options.optimizer_options,
                                            model_config(options).n_embd);
  const auto add = [&](const std::string& path, const Json& value,
                       const std::string& source) {
    values[path] = {value.dump(), source};
  };
  const auto has_number = [&](const std::string& path) {
    const Json::json_pointer at(path);
    return json.contains(at) && json[at].is_number();
  };
  // Two sizes give the third; with only one of them, g is 1
  const bool has_train = has_number("/train_batch_size");
  const bool has_micro = has_number("/train_micro_batch_size_per_gpu");
  add("/train_batch_size", options.batch, "--batch");
  if (has_micro && !is_given(given, "--batch"))
    values["/train_batch_size"] = {};
  values["/train_micro_batch_size_per_gpu"] = {};
  add("/gradient_accumulation_steps", 1, "the Trainer's default");
  if (has_train && has_micro) values["/gradient_accumulation_steps"] = {};

  const std::string schedule = "/scheduler/params/";
  const std::string lr = "/optimizer/params/lr";
  add(schedule + "warmup_min_lr", 0, "the Trainer");
  if (has_number(lr)) {
    add(schedule + "warmup_max_lr", json[Json::json_pointer(lr)], lr);
  }
  // DeepSpeed refuses 0
  add(schedule + "warmup_num_steps", std::max<std::int64_t>(1, options.warmup),
      "--warmup");
  add(schedule + "total_num_steps", options.steps, "--steps");

  const bool clips = is_given(given, "--clip");
  add("/gradient_clipping", clips ? options.clip : 1.0,
      clips ? "--clip" : "the Trainer's default");
  for (const char* path : {"/bf16/enabled", "/bfloat16/enabled"}) {
    add(path, options.dtype == DType::kBF16, "--dtype");
  }
  add("/fp16/enabled", options.dtype == DType::kF16, "--dtype");
  return values;
}

}  // namespace

AutoValues internal::auto_values(const OptimizerOptions& optimizer,
                                 std::int64_t h) {
  AutoValues values;
  const auto add = [&](const std::string& path, const Json& value,
                       const std::string& source) {
    values[path] = {value.dump(), source};
  };
  const std::string params = "/optimizer/params/";
  add(params + "lr", optimizer.lr, "--lr");
  add(params + "betas", {optimizer.beta1, optimizer.beta2},
      "--beta1 and --beta2");
  add(params + "eps", optimizer.eps, "--eps");
  add(params + "weight_decay", optimizer.weight_decay, "--weight-decay");
  add(params + "momentum", optimizer.momentum, "--momentum");
  add("/scheduler/params/warmup_max_lr", optimizer.lr, "--lr");
  if (h == 0) return values;
  const std::string zero = "/zero_optimization/", of = "the model's width";
  add(zero + "reduce_bucket_size", h * h, of);
  add(zero + "stage3_prefetch_bucket_size", h * h * 9 / 10, of);
  add(zero + "stage3_param_persistence_threshold", 10 * h, of);
  return values;
}

DeepSpeedConfig read_config(const std::string& file, const Options& options,
                            const Given& given) {
  const auto [text, label] =
      internal::config_text(file, "--config", "--config");
  // `parse` reports invalid JSON
  if (text.find("\"auto\"") == std::string::npos) {
    return DeepSpeedConfig::parse(text, label);
  }
  const Json json = json_file::parse_json(json_file::plain_json(text), label);
  FilledConfig filled = fill_auto(text, label, values_of(json, options, given));
  DeepSpeedConfig config = DeepSpeedConfig::parse(filled.text, label);
  const std::string warmup = "/scheduler/params/warmup_num_steps";
  const auto is_auto = [&](const std::string& path) {
    const Json::json_pointer at(path);
    return json.contains(at) && json[at] == "auto";
  };
  if (is_auto(warmup)) config.filled_from.insert("--warmup");

  // Name the sizes that follow from the others
  const auto name_size = [&](const char* path, std::int64_t given_size,
                             std::int64_t size) {
    if (!is_auto(path) || given_size > 0) return;
    filled.remarks.push_back(path + (" \"auto\": " + std::to_string(size)) +
                             ", from the other sizes");
  };
  const bool has_size = config.batch.train > 0 || config.batch.micro > 0;
  BatchSizes sizes = config.batch;
  if (!has_size) sizes.train = options.batch;
  sizes = resolve_batch(sizes, data_parallel_ranks(options, config));
  name_size("/train_batch_size", config.batch.train, sizes.train);
  name_size("/train_micro_batch_size_per_gpu", config.batch.micro, sizes.micro);
  name_size("/gradient_accumulation_steps", config.batch.accumulation,
            sizes.accumulation);
  config.remarks.insert(config.remarks.begin(), filled.remarks.begin(),
                        filled.remarks.end());
  return config;
}

}  // namespace shardbook::engine
