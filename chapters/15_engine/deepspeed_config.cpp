// Reading a config, with every mistake at once, and writing it.

#include "chapters/15_engine/deepspeed_config.h"

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "chapters/15_engine/internal/config_rules.h"
#include "chapters/15_engine/internal/deepspeed_keys.h"
#include "chapters/common/models/data.h"
#include "core/check.h"
#include "sim/json_object.h"

namespace shardbook::engine {
namespace {

using json_file::Json;
using json_file::JsonObject;

constexpr std::size_t kMostProblems = 20;

/// A message for each mistake; of very many, the first ones.
void refuse(std::vector<std::string> problems, const std::string& label) {
  if (problems.empty()) return;
  std::string all;
  for (std::size_t i = 0; i < std::min(problems.size(), kMostProblems); ++i) {
    all += (i > 0 ? "\n" : "") + problems[i];
  }
  if (problems.size() > kMostProblems) {
    all += "\n" + label + ": " +
           std::to_string(problems.size() - kMostProblems) +
           " more mistakes like these";
  }
  SB_FAIL(all);
}

/// The path that a message is about.
std::string path_of(const std::string& problem, const std::string& label) {
  const std::string rest = problem.substr(label.size() + 2);
  return rest.substr(0, rest.find(": "));
}

/// Values that DeepSpeed's defaults replace.
void remark_defaults(const std::vector<std::string>& paths,
                     DeepSpeedConfig& config) {
  if (paths.empty()) return;
  const Json written = Json::parse(config.to_json());
  for (const std::string& path : paths) {
    const Json::json_pointer at(path);
    config.remarks.push_back(
        path + " \"auto\": " +
        (written.contains(at) ? json_file::shown(written[at]) + ", " : "") +
        "DeepSpeed's default");
  }
}

/// Removes values that turned out to have no effect.
void keep_acting(DeepSpeedConfig& config) {
  const auto is_idle = [&](const std::string& path) {
    const auto& remarks = config.remarks;
    return std::any_of(remarks.begin(), remarks.end(), [&](const auto& each) {
      const std::size_t end = each.find(": has no effect here");
      return end != std::string::npos &&
             (path + "/").rfind(each.substr(0, end) + "/", 0) == 0;
    });
  };
  config.acts.erase(
      std::remove_if(config.acts.begin(), config.acts.end(), is_idle),
      config.acts.end());
}

}  // namespace

DeepSpeedConfig DeepSpeedConfig::parse(const std::string& text,
                                       const std::string& label) {
  const std::string problem = utf8_problem(text);
  SB_CHECK(problem.empty(), label, ": ", problem);
  SB_CHECK(text.size() < (1 << 20), label, ": longer than 1 MiB");
  const Json json = json_file::parse_json(json_file::plain_json(text), label);
  internal::SortedKeys keys = internal::sort_keys(json, label);
  std::vector<std::string> problems = std::move(keys.problems);
  JsonObject root(keys.acting, label, "", &problems);
  DeepSpeedConfig config;
  config.label = label;
  config.acts = std::move(keys.acts);
  config.remarks = std::move(keys.no_effect);
  internal::read_keys(root, keys.parameters, config);

  // Rules need all values
  std::vector<std::string> doubtful = std::move(keys.meant);
  for (const std::string& each : problems) {
    doubtful.push_back(path_of(each, label));
  }
  for (const std::string& each : internal::broken_rules(config)) {
    const bool is_sure =
        std::none_of(doubtful.begin(), doubtful.end(), [&](const auto& path) {
          return path != "/" && each.find(path) != std::string::npos;
        });
    if (is_sure) problems.push_back(each);
  }
  refuse(std::move(problems), label);
  remark_defaults(keys.defaults, config);
  const auto more =
      internal::remarks_of(config, root.find("gradient_clipping") != nullptr);
  config.remarks.insert(config.remarks.end(), more.begin(), more.end());
  keep_acting(config);
  return config;
}

DeepSpeedConfig DeepSpeedConfig::read(const std::string& file) {
  const auto [text, label] =
      internal::config_text(file, "--config", "--config");
  return parse(text, label);
}

internal::ConfigText internal::config_text(const std::string& file,
                                           const std::string& option,
                                           const std::string& text_label) {
  if (file.rfind('{', 0) == 0) return {file, text_label};
  std::ifstream in(file, std::ios::binary);
  std::ostringstream text;
  // A folder opens like a file, but reads nothing
  text << in.rdbuf();
  SB_CHECK(in && !text.str().empty(), option, " ", file,
           ": cannot be read, or is empty; give a JSON file with DeepSpeed's "
           "keys");
  return {text.str(), file};
}

// --- A config as text, and values for "auto" ---------------------------------------

namespace {

using Ordered = nlohmann::ordered_json;

Ordered optimizer_json(const OptimizerConfig& optimizer) {
  const OptimizerOptions& from = optimizer.params;
  Ordered params = {{"lr", from.lr}, {"weight_decay", from.weight_decay}};
  if (optimizer.type == "SGD") {
    params["momentum"] = from.momentum;
    params["dampening"] = from.dampening;
    params["nesterov"] = from.nesterov;
  } else {
    params["betas"] = {from.beta1, from.beta2};
    params["eps"] = from.eps;
  }
  if (optimizer.type == "Adam") params["adam_w_mode"] = optimizer.adam_w_mode;
  if (optimizer.torch_adam) params["torch_adam"] = true;
  return {{"type", optimizer.type}, {"params", params}};
}

Ordered scheduler_json(const SchedulerConfig& scheduler) {
  Ordered params = {{"warmup_min_lr", scheduler.warmup_min_lr}};
  if (scheduler.warmup_max_lr) {
    params["warmup_max_lr"] = *scheduler.warmup_max_lr;
  } else if (scheduler.type == "WarmupDecayLR") {
    params["warmup_max_lr"] = nullptr;
  }
  params["warmup_num_steps"] = scheduler.warmup_num_steps;
  params["warmup_type"] = scheduler.warmup_type;
  if (scheduler.total_num_steps > 0) {
    params["total_num_steps"] = scheduler.total_num_steps;
  }
  return {{"type", scheduler.type}, {"params", params}};
}

Ordered fp16_json(const Fp16Config& fp16) {
  return {
      {"enabled", fp16.enabled},
      {"auto_cast", fp16.auto_cast},
      {"loss_scale", fp16.loss_scale},
      {"initial_scale_power", fp16.initial_scale_power},
      {"loss_scale_window", fp16.loss_scale_window},
      {"hysteresis", fp16.hysteresis},
      {"consecutive_hysteresis", fp16.consecutive_hysteresis},
      {"min_loss_scale", fp16.min_loss_scale},
      {"fp16_master_weights_and_grads", fp16.fp16_master_weights_and_grads}};
}

Ordered offload_json(const OffloadConfig& offload) {
  return Ordered::object({{"device", offload.device}});
}

Ordered zero_json(const ZeroConfig& zero) {
  Ordered json = {
      {"stage", zero.stage},
      {"allgather_partitions", zero.allgather_partitions},
      {"allgather_bucket_size", zero.allgather_bucket_size},
      {"reduce_scatter", zero.reduce_scatter},
      {"reduce_bucket_size", zero.reduce_bucket_size},
      {"overlap_comm", zero.overlaps()},
      {"contiguous_gradients", zero.contiguous_gradients},
      {"offload_optimizer", offload_json(zero.offload_optimizer)},
      {"offload_param", offload_json(zero.offload_param)},
      {"stage3_prefetch_bucket_size", zero.stage3_prefetch_bucket_size},
      {"stage3_param_persistence_threshold",
       zero.stage3_param_persistence_threshold},
      {"stage3_max_live_parameters", zero.stage3_max_live_parameters},
      {"stage3_max_reuse_distance", zero.stage3_max_reuse_distance},
      {"sub_group_size", zero.sub_group_size},
      {"round_robin_gradients", zero.round_robin_gradients}};
  if (!zero.computes_grad_norm) json["compute_grad_norm"] = false;
  return json;
}

Ordered book_json(const BookConfig& book) {
  Ordered json = {{"tensor_parallel",
                   {{"size", book.tensor_parallel},
                    {"mode", book.tensor_parallel_mode},
                    {"depth", book.tensor_parallel_depth},
                    {"sequence_parallel", book.sequence_parallel}}},
                  {"context_parallel",
                   {{"size", book.context_parallel},
                    {"kind", book.context_parallel_kind},
                    {"layout", book.context_parallel_layout}}},
                  {"schedule", book.schedule},
                  {"chunks", book.chunks},
                  {"recompute", book.recompute},
                  {"sharding", book.sharding}};
  if (book.num_experts.empty()) return json;
  json["experts"] = {{"num_experts", book.num_experts},
                     {"ep_size", book.ep_size},
                     {"top_k", book.top_k},
                     {"capacity_factor", book.capacity_factor},
                     {"min_capacity", book.min_capacity},
                     {"noisy_gate_policy", book.noisy_gate_policy},
                     {"drop_tokens", book.drop_tokens},
                     {"use_rts", book.use_rts},
                     {"aux_coefficient", book.aux_coefficient},
                     {"use_residual", book.use_residual},
                     {"use_data_before_expert_parallelism",
                      book.use_data_before_expert_parallelism},
                     {"enable_expert_tensor_parallelism",
                      book.enable_expert_tensor_parallelism}};
  return json;
}

void write(const DeepSpeedConfig& config, Ordered& json) {
  const auto size = [&](const char* key, std::int64_t value) {
    if (value > 0) json[key] = value;
  };
  size("train_batch_size", config.batch.train);
  size("train_micro_batch_size_per_gpu", config.batch.micro);
  size("gradient_accumulation_steps", config.batch.accumulation);
  size("steps_per_print", config.steps_per_print);
  if (!config.optimizer.type.empty())
    json["optimizer"] = optimizer_json(config.optimizer);
  if (config.allows_untested_optimizer) {
    json["zero_allow_untested_optimizer"] = true;
  }
  if (!config.scheduler.type.empty())
    json["scheduler"] = scheduler_json(config.scheduler);
  json["gradient_clipping"] = config.gradient_clipping;
  json["prescale_gradients"] = config.prescale_gradients;
  json["gradient_predivide_factor"] = config.gradient_predivide_factor;
  if (!config.communication_data_type.empty()) {
    json["communication_data_type"] = config.communication_data_type;
  }
  if (!config.seq_parallel_communication_data_type.empty()) {
    json["seq_parallel_communication_data_type"] =
        config.seq_parallel_communication_data_type;
  }
  if (!config.grad_accum_dtype.empty()) {
    json["data_types"] = {{"grad_accum_dtype", config.grad_accum_dtype}};
  }
  json["bf16"] = {{"enabled", config.bf16}};
  json["fp16"] = fp16_json(config.fp16);
  json["zero_optimization"] = zero_json(config.zero);
  json["pipeline"] = {{"stages", config.pipeline.stages},
                      {"partition", config.pipeline.partition},
                      {"activation_checkpoint_interval",
                       config.pipeline.activation_checkpoint_interval}};
  if (config.activation_checkpointing) {
    json["activation_checkpointing"] = {{"partition_activations", true}};
  }
  json["shardbook"] = book_json(config.book);
  json["wall_clock_breakdown"] = config.wall_clock_breakdown;
}

std::string text_of(const Ordered& json) {
  return json.dump(2, ' ', /*ensure_ascii=*/true) + "\n";
}

}  // namespace

std::string DeepSpeedConfig::to_json() const {
  Ordered json = Ordered::object();
  write(*this, json);
  return text_of(json);
}

std::string DeepSpeedConfig::explained() const {
  Ordered json = Ordered::object();
  std::string paths;
  for (const std::string& path : acts) {
    paths += (paths.empty() ? "" : ", ") + path;
  }
  json["_acts"] = paths;
  for (std::size_t i = 0; i < remarks.size(); ++i) {
    json["_remark " + std::to_string(i + 1)] = remarks[i];
  }
  write(*this, json);
  return text_of(json);
}

FilledConfig fill_auto(const std::string& text, const std::string& label,
                       const AutoValues& values) {
  json_file::Json json =
      json_file::parse_json(json_file::plain_json(text), label);
  FilledConfig filled;
  for (const auto& [path, value] : values) {
    const json_file::Json::json_pointer at(path);
    if (!json.contains(at) || json[at] != "auto") continue;
    if (value.json.empty()) {
      json[at.parent_pointer()].erase(at.back());
      continue;
    }
    json[at] =
        json_file::parse_json(value.json, label + ": the value of " + path);
    filled.remarks.push_back(path + " \"auto\": " + json_file::shown(json[at]) +
                             ", from " + value.source);
  }
  filled.text = json.dump(2);
  return filled;
}

}  // namespace shardbook::engine
