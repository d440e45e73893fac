// "auto" in a config, as Hugging Face's Trainer fills it: from the command line and
// the model.

#include <algorithm>
#include <nlohmann/json.hpp>

#include "chapters/15_engine/internal/config_rules.h"
#include "chapters/15_engine/strategies.h"
#include "chapters/common/models/models.h"
#include "sim/json_object.h"

namespace shardbook::engine {
namespace {

using json_file::Json;

class Values {
 public:
  Values(const Json& json, const Options& options, const Given& given)
      : json_(json), options_(options), given_(given) {}

  std::map<std::string, AutoValue> all() {
    add_batch();
    add_optimizer();
    add_schedule();
    const bool clips = is_given("--clip");
    add("/gradient_clipping", clips ? options_.clip : 1.0,
        clips ? "--clip" : "the Trainer's default");
    for (const char* path : {"/bf16/enabled", "/bfloat16/enabled"}) {
      add(path, options_.dtype == DType::kBF16, "--dtype");
    }
    add("/fp16/enabled", options_.dtype == DType::kF16, "--dtype");
    add_buckets();
    return std::move(values_);
  }

 private:
  bool is_given(const std::string& option) const {
    return std::any_of(given_.begin(), given_.end(),
                       [&](const auto& each) { return each.first == option; });
  }
  bool has_number(const std::string& path) const {
    const Json::json_pointer at(path);
    return json_.contains(at) && json_[at].is_number();
  }
  void add(const std::string& path, const Json& value,
           const std::string& source) {
    values_[path] = {value.dump(), source};
  }

  /// Two sizes give the third; with only one of them, g is 1.
  void add_batch() {
    const bool has_train = has_number("/train_batch_size");
    const bool has_micro = has_number("/train_micro_batch_size_per_gpu");
    add("/train_batch_size", options_.batch, "--batch");
    if (has_micro && !is_given("--batch")) values_["/train_batch_size"] = {};
    values_["/train_micro_batch_size_per_gpu"] = {};
    add("/gradient_accumulation_steps", 1, "the Trainer's default");
    if (has_train && has_micro) values_["/gradient_accumulation_steps"] = {};
  }

  void add_optimizer() {
    const OptimizerOptions& from = options_.optimizer_options;
    const std::string params = "/optimizer/params/";
    add(params + "lr", from.lr, "--lr");
    add(params + "betas", {from.beta1, from.beta2}, "--beta1 and --beta2");
    add(params + "eps", from.eps, "--eps");
    add(params + "weight_decay", from.weight_decay, "--weight-decay");
    add(params + "momentum", from.momentum, "--momentum");
  }

  void add_schedule() {
    const std::string params = "/scheduler/params/";
    const std::string lr = "/optimizer/params/lr";
    add(params + "warmup_min_lr", 0, "the Trainer");
    if (has_number(lr)) {
      add(params + "warmup_max_lr", json_[Json::json_pointer(lr)], lr);
    } else {
      add(params + "warmup_max_lr", options_.optimizer_options.lr, "--lr");
    }
    add(params + "warmup_num_steps", options_.warmup, "--warmup");
    add(params + "total_num_steps", options_.steps, "--steps");
  }

  void add_buckets() {
    const std::int64_t h = model_config(options_).n_embd;
    if (h == 0) return;
    const std::string zero = "/zero_optimization/", of = "the model's width";
    add(zero + "reduce_bucket_size", h * h, of);
    add(zero + "stage3_prefetch_bucket_size", h * h * 9 / 10, of);
    add(zero + "stage3_param_persistence_threshold", 10 * h, of);
  }

  const Json& json_;
  const Options& options_;
  const Given& given_;
  std::map<std::string, AutoValue> values_;
};

}  // namespace

DeepSpeedConfig read_config(const std::string& file, const Options& options,
                            const Given& given) {
  const bool is_text = file.rfind('{', 0) == 0;
  const std::string label = is_text ? "--config" : file;
  const std::string text =
      is_text ? file : internal::read_config_file("--config", file);
  // `parse` reports invalid JSON
  if (text.find("\"auto\"") == std::string::npos) {
    return DeepSpeedConfig::parse(text, label);
  }
  const Json json = json_file::parse_json(json_file::plain_json(text), label);
  FilledConfig filled =
      fill_auto(text, label, Values(json, options, given).all());
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
