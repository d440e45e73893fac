// The sections of a config, in the order of the page's table.

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "chapters/15_engine/internal/config_rules.h"

namespace shardbook::engine {
namespace {

using internal::Section;
using json_file::Json;
using json_file::JsonObject;

constexpr std::int64_t kMostSamples = std::int64_t{1} << 40;
constexpr std::int64_t kMostElements = std::int64_t{1} << 50;
constexpr double kMost = 1e30;

/// Names of dtypes as DeepSpeed accepts them: in /data_types "bf16", "float32" or
/// "torch.float16", elsewhere "bf16" and "FP32".
void read_dtype(JsonObject& object, const std::string& key, bool is_data_type,
                std::string& value) {
  std::string name;
  object.text(key, name);
  const Json* json = object.find(key);
  if (json == nullptr || !json->is_string()) return;
  std::map<std::string, std::string> usual = {
      {"fp32", "fp32"}, {"fp16", "fp16"}, {"bf16", "bf16"}};
  if (is_data_type) {
    usual.insert({{"float32", "fp32"},
                  {"torch.float32", "fp32"},
                  {"float", "fp32"},
                  {"float16", "fp16"},
                  {"torch.float16", "fp16"},
                  {"half", "fp16"},
                  {"bfloat16", "bf16"},
                  {"torch.bfloat16", "bf16"}});
  }
  const auto found =
      usual.find(is_data_type ? name : internal::lower_case(name));
  object.check(found != usual.end(), object.where(key), ": \"",
               json_file::printable(name),
               "\" is unknown; give fp32, fp16 or bf16");
  if (found != usual.end()) value = found->second;
}

void read_precision(JsonObject& root, DeepSpeedConfig& config) {
  root.also("bf16", "bfloat16");
  Section bf16(root, "bf16");
  bf16.object.flag("enabled", config.bf16);

  Section section(root, "fp16");
  JsonObject& object = section.object;
  Fp16Config& fp16 = config.fp16;
  object.flag("enabled", fp16.enabled);
  object.flag("auto_cast", fp16.auto_cast);
  object.number("loss_scale", 0, kMost, fp16.loss_scale);
  object.integer("initial_scale_power", -1000, 1000, fp16.initial_scale_power);
  object.whole("loss_scale_window", -kMostSamples, kMostSamples,
               fp16.loss_scale_window);
  object.integer("hysteresis", -(1 << 20), 1 << 20, fp16.hysteresis);
  object.flag("consecutive_hysteresis", fp16.consecutive_hysteresis);
  object.whole("min_loss_scale", -kMostSamples, kMostSamples,
               fp16.min_loss_scale);
  object.flag("fp16_master_weights_and_grads",
              fp16.fp16_master_weights_and_grads);

  Section types(root, "data_types");
  read_dtype(types.object, "grad_accum_dtype", true, config.grad_accum_dtype);
  std::string parameters;
  read_dtype(types.object, "param_dtype", true, parameters);
  if (parameters.empty()) return;
  const bool agrees = dtype_of(parameters) == config.dtype(DType::kF32);
  types.object.check(agrees, types.object.where("param_dtype"), ": ",
                     parameters,
                     " is not offered: the dtype of the model is "
                     "that of /bf16, /fp16 or --dtype; leave it out");
  if (agrees) {
    config.remarks.push_back(
        "/data_types/param_dtype: has no effect here: /bf16, /fp16 or --dtype "
        "says the same");
  }
}

void read_offload(JsonObject& zero, const std::string& name,
                  const std::string& deprecated, OffloadConfig& offload) {
  Section section(zero, name);
  const Json* device = section.object.find("device");
  const bool is_nvme = device != nullptr && *device == "nvme";
  section.object.check(!is_nvme, section.object.where("device"),
                       ": \"nvme\" is not offered: the book keeps no tensors "
                       "in files; give none or cpu");
  if (!is_nvme)
    section.object.choice("device", {"none", "cpu"}, offload.device);
  bool old = false;
  zero.flag(deprecated, old);
  if (zero.find(deprecated) == nullptr) return;
  zero.check(section.json == nullptr, zero.where(deprecated),
             ": is the old name of /zero_optimization/", name,
             ", which the file has as well; keep that one");
  if (old) offload.device = "cpu";
}

/// The part of the optimizer that is on the host.
void read_ratio(JsonObject& zero, int stage,
                std::vector<std::string>& remarks) {
  Section section(zero, "offload_optimizer");
  double ratio = 1;
  section.object.number("ratio", 0, 1, ratio);
  if (section.object.find("ratio") == nullptr) return;
  section.object.check(ratio == 1 || stage == 3, section.object.where("ratio"),
                       ": ", ratio, " with /zero_optimization/stage ", stage,
                       ": DeepSpeed splits the optimizer in stage 3 only; give "
                       "1, or leave it out");
  remarks.emplace_back(
      "/zero_optimization/offload_optimizer/ratio: has no effect here: all of "
      "the optimizer is on the host");
}

/// DeepSpeed's first form, true for stage 1.
bool read_old_zero(JsonObject& root, ZeroConfig& zero) {
  const Json* json = root.find("zero_optimization");
  const bool is_old = json != nullptr && json->is_boolean();
  root.check(is_old || root.find("allgather_size") == nullptr,
             root.where("allgather_size"),
             ": goes with the old form /zero_optimization true; give "
             "/zero_optimization/allgather_bucket_size");
  if (!is_old) return false;
  zero.stage = json->get<bool>() ? 1 : 0;
  root.whole("allgather_size", 0, kMostElements, zero.allgather_bucket_size);
  return true;
}

void read_zero(JsonObject& root, ZeroConfig& zero,
               std::vector<std::string>& remarks) {
  if (read_old_zero(root, zero)) return;
  Section section(root, "zero_optimization");
  JsonObject& object = section.object;
  object.integer("stage", 0, 3, zero.stage);
  object.flag("allgather_partitions", zero.allgather_partitions);
  object.whole("allgather_bucket_size", 0, kMostElements,
               zero.allgather_bucket_size);
  object.flag("reduce_scatter", zero.reduce_scatter);
  object.whole("reduce_bucket_size", 1, kMostElements, zero.reduce_bucket_size);
  bool overlaps = zero.overlaps();
  object.flag("overlap_comm", overlaps);
  if (object.find("overlap_comm") != nullptr) zero.overlap_comm = overlaps;
  object.flag("contiguous_gradients", zero.contiguous_gradients);
  read_offload(object, "offload_optimizer", "cpu_offload",
               zero.offload_optimizer);
  read_ratio(object, zero.stage, remarks);
  read_offload(object, "offload_param", "cpu_offload_param",
               zero.offload_param);
  // The update runs where the shards are
  if (zero.stage == 3 && zero.offload_optimizer.device == "none" &&
      zero.offload_param.device == "cpu") {
    zero.offload_optimizer.device = "cpu";
    remarks.push_back(
        "/zero_optimization/offload_param without "
        "/zero_optimization/offload_optimizer: the optimizer is on the host as "
        "well, where its shards are, and computes the same numbers");
  }
  const auto of_stage_3 = [&](const std::string& name, std::int64_t& value) {
    object.also("stage3_" + name, name);
    object.whole("stage3_" + name, 0, kMostElements, value);
  };
  of_stage_3("prefetch_bucket_size", zero.stage3_prefetch_bucket_size);
  of_stage_3("param_persistence_threshold",
             zero.stage3_param_persistence_threshold);
  of_stage_3("max_live_parameters", zero.stage3_max_live_parameters);
  of_stage_3("max_reuse_distance", zero.stage3_max_reuse_distance);
  object.whole("sub_group_size", 0, kMostElements, zero.sub_group_size);
  object.flag("round_robin_gradients", zero.round_robin_gradients);
  object.flag("compute_grad_norm", zero.computes_grad_norm);
  if (object.find("compute_grad_norm") != nullptr) {
    remarks.emplace_back(
        "/zero_optimization/compute_grad_norm: has no effect here: the report "
        "has the norm, so it is computed in any case");
  }
}

void read_pipeline(JsonObject& root, PipelineConfig& pipeline) {
  Section section(root, "pipeline");
  JsonObject& object = section.object;
  object.integer("stages", 1, 1 << 16, pipeline.stages);
  object.text("partition", pipeline.partition);
  object.whole("activation_checkpoint_interval", 0, kMostSamples,
               pipeline.activation_checkpoint_interval);
}

/// In DeepSpeed the section configures models that recompute; here, keys for
/// these models turn recomputation on.
void read_activations(JsonObject& root, DeepSpeedConfig& config) {
  Section section(root, "activation_checkpointing");
  if (!section.is_object()) return;
  bool& asks = config.activation_checkpointing;
  for (const char* key : {"partition_activations", "cpu_checkpointing",
                          "contiguous_memory_optimization"}) {
    bool is_asked = false;
    section.object.flag(key, is_asked);
    asks = asks || is_asked;
  }
  const Json* number = section.object.find("number_checkpoints");
  std::int64_t checkpoints = 0;
  if (number != nullptr && !number->is_null()) {
    section.object.whole("number_checkpoints", 0, kMostSamples, checkpoints);
  }
  asks = asks || checkpoints > 0;
  if (asks) return;
  config.remarks.push_back(
      "/activation_checkpointing: has no effect here: nothing in it asks for "
      "recomputation");
}

void read_num_experts(JsonObject& object, std::vector<int>& to) {
  const Json* counts = object.find("num_experts");
  const std::string where = object.where("num_experts");
  object.check(counts != nullptr, where,
               ": missing; give a number of experts, or a list with one for "
               "each layer");
  if (counts == nullptr) return;
  const Json list = counts->is_array() ? *counts : Json::array({*counts});
  const bool fits = !list.empty() && list.size() <= 4096;
  object.check(fits, where, ": give a number, or a list of 1 to 4096 numbers");
  if (!fits) return;
  for (const Json& each : list) {
    int number = 1;
    const Json one = {{"num_experts", each}};
    JsonObject(one, object.file(), "/shardbook/experts", object.problems())
        .integer("num_experts", 1, 1 << 20, number);
    to.push_back(number);
  }
}

void read_experts(JsonObject& book, BookConfig& to) {
  Section section(book, "experts");
  if (!section.is_object()) return;
  JsonObject& object = section.object;
  read_num_experts(object, to.num_experts);
  object.integer("ep_size", 0, 1 << 16, to.ep_size);
  object.integer("top_k", 1, 1 << 16, to.top_k);
  object.number("capacity_factor", 0.01, kMost, to.capacity_factor);
  object.integer("min_capacity", 0, 1 << 30, to.min_capacity);
  object.choice("noisy_gate_policy", {"None", "Jitter", "RSample"},
                to.noisy_gate_policy);
  object.flag("drop_tokens", to.drop_tokens);
  object.flag("use_rts", to.use_rts);
  object.number("aux_coefficient", 0, kMost, to.aux_coefficient);
  object.flag("use_residual", to.use_residual);
  object.flag("use_data_before_expert_parallelism",
              to.use_data_before_expert_parallelism);
  object.flag("enable_expert_tensor_parallelism",
              to.enable_expert_tensor_parallelism);
}

/// Choices that have names of their own in DeepSpeed.
void read_parallel_names(JsonObject& root, BookConfig& to,
                         std::vector<std::string>& remarks) {
  Section autotp(root, "tensor_parallel");
  autotp.object.integer("autotp_size", 0, 1 << 16, to.tensor_parallel);
  to.tensor_parallel = std::max(to.tensor_parallel, 1);
  for (const char* name : {"tp", "tensor_parallel"}) {
    Section group(autotp.object, name);
    int size = 1;
    group.object.integer("tp_size", 0, 1 << 16, size);
    if (group.object.find("tp_size") == nullptr) continue;
    const bool agrees =
        size == 1 || to.tensor_parallel == 1 || size == to.tensor_parallel;
    group.object.check(agrees, group.object.where("tp_size"), ": ", size,
                       " is not /tensor_parallel/autotp_size ",
                       to.tensor_parallel, "; leave it out");
    remarks.push_back("/tensor_parallel/" + std::string(name) +
                      "/tp_size: has no effect here: "
                      "/tensor_parallel/autotp_size says it");
  }
  root.integer("sequence_parallel_size", 1, 1 << 16, to.context_parallel);
  if (root.find("sequence_parallel_size") != nullptr) {
    to.context_parallel_kind = "ulysses";
  }
  root.flag("use_data_before_expert_parallelism",
            to.use_data_before_expert_parallelism);
}

void read_book(JsonObject& root, BookConfig& to,
               std::vector<std::string>& remarks) {
  read_parallel_names(root, to, remarks);
  Section section(root, "shardbook");
  JsonObject& object = section.object;
  Section tensor(object, "tensor_parallel");
  const auto keep_one = [&](const Section& own, const std::string& name,
                            const std::string& other) {
    const Json* json = root.find(other.substr(1, other.find('/', 1) - 1));
    object.check(own.json == nullptr || json == nullptr, object.where(name),
                 ": ", other, " is in the file as well; keep one of them");
  };
  keep_one(tensor, "tensor_parallel", "/tensor_parallel/autotp_size");
  tensor.object.integer("size", 1, 1 << 16, to.tensor_parallel);
  tensor.object.choice("mode", {"1d", "2d", "2.5d", "3d"},
                       to.tensor_parallel_mode);
  tensor.object.integer("depth", 1, 1 << 16, to.tensor_parallel_depth);
  tensor.object.flag("sequence_parallel", to.sequence_parallel);
  Section context(object, "context_parallel");
  keep_one(context, "context_parallel", "/sequence_parallel_size");
  context.object.integer("size", 1, 1 << 16, to.context_parallel);
  context.object.choice("kind", {"ring", "rsa", "ulysses"},
                        to.context_parallel_kind);
  context.object.choice("layout", {"contiguous", "zigzag", "striped"},
                        to.context_parallel_layout);
  object.text("schedule", to.schedule);
  object.integer("chunks", 2, 1 << 16, to.chunks);
  object.choice("recompute", {"never", "attention", "blocks"}, to.recompute);
  object.choice("sharding", {"zero", "fsdp", "fsdp2"}, to.sharding);
  read_experts(object, to);
}

}  // namespace

void internal::read_keys(JsonObject& root,
                         const std::vector<std::string>& parameters,
                         DeepSpeedConfig& config) {
  root.whole("train_batch_size", 1, kMostSamples, config.batch.train);
  root.whole("train_micro_batch_size_per_gpu", 1, kMostSamples,
             config.batch.micro);
  root.whole("gradient_accumulation_steps", 1, std::int64_t{1} << 20,
             config.batch.accumulation);
  root.whole("steps_per_print", 1, INT64_MAX, config.steps_per_print);
  read_optimizer(root, config);
  read_scheduler(root, config);
  root.number("gradient_clipping", -kMost, kMost, config.gradient_clipping);
  // Below 0 it is off, as at 0
  config.gradient_clipping = std::max(0.0, config.gradient_clipping);
  root.flag("prescale_gradients", config.prescale_gradients);
  root.number("gradient_predivide_factor", 1e-30, kMost,
              config.gradient_predivide_factor);
  read_dtype(root, "communication_data_type", false,
             config.communication_data_type);
  read_dtype(root, "seq_parallel_communication_data_type", false,
             config.seq_parallel_communication_data_type);
  read_precision(root, config);
  read_zero(root, config.zero, config.remarks);
  check_parameters(root, parameters, config);
  read_pipeline(root, config.pipeline);
  read_activations(root, config);
  read_book(root, config.book, config.remarks);
  root.flag("wall_clock_breakdown", config.wall_clock_breakdown);
}

}  // namespace shardbook::engine
