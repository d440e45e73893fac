// A config as text, and values for "auto".

#include <nlohmann/json.hpp>

#include "chapters/15_engine/deepspeed_config.h"
#include "core/check.h"
#include "sim/json_object.h"

namespace shardbook::engine {
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
  return {{"type", optimizer.type}, {"params", params}};
}

Ordered scheduler_json(const SchedulerConfig& scheduler) {
  Ordered params = {{"warmup_min_lr", scheduler.warmup_min_lr}};
  if (scheduler.warmup_max_lr) {
    params["warmup_max_lr"] = *scheduler.warmup_max_lr;
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
  return {{"device", offload.device}, {"pin_memory", offload.pin_memory}};
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
                       const std::map<std::string, AutoValue>& values) {
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
