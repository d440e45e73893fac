// The sections of a config, in the order of the page's table. Functions over
// `Fields` say each key once: a JsonObject reads it, a Writer writes it.

#include <algorithm>
#include <utility>

#include "chapters/15_engine/internal/config_writer.h"

namespace shardbook::engine {
namespace {

using internal::has_object;
using internal::kMostCount;
using internal::kMostNumber;
using internal::omits;
using internal::section;
using internal::Writer;
using json_file::Json;
using json_file::JsonObject;

constexpr std::int64_t kMostElements = std::int64_t{1} << 50;

/// Names of dtypes as DeepSpeed accepts them: in /data_types "bf16", "float32" or
/// "torch.float16", elsewhere "bf16" and "FP32".
void dtype(JsonObject& object, const std::string& key, bool is_data_type,
           std::string& value) {
  std::string name;
  object.text(key, name);
  const Json* json = object.find(key);
  if (json == nullptr || !json->is_string()) return;
  const std::string given = is_data_type ? name : internal::lower_case(name);
  std::string usual;
  for (const auto& [own, others] :
       {std::pair{"fp32", "float32 torch.float32 float"},
        std::pair{"fp16", "float16 torch.float16 half"},
        std::pair{"bf16", "bfloat16 torch.bfloat16"}}) {
    const bool is_other = is_data_type && internal::has_word(others, given);
    if (given == own || is_other) usual = own;
  }
  object.check(!usual.empty(), object.where(key), ": \"",
               json_file::printable(name),
               "\" is unknown; give fp32, fp16 or bf16");
  if (!usual.empty()) value = usual;
}
void dtype(Writer& object, const std::string& key, bool,
           const std::string& value) {
  if (!value.empty()) object.text(key, value);
}

template <typename Fields>
void bf16_and_fp16(Fields& root, DeepSpeedConfig& config) {
  root.also("bf16", "bfloat16");
  section(root, "bf16").flag("enabled", config.bf16);
  auto object = section(root, "fp16");
  Fp16Config& fp16 = config.fp16;
  object.flag("enabled", fp16.enabled);
  object.flag("auto_cast", fp16.auto_cast);
  object.number("loss_scale", 0, kMostNumber, fp16.loss_scale);
  object.integer("initial_scale_power", -1000, 1000, fp16.initial_scale_power);
  object.whole("loss_scale_window", -kMostCount, kMostCount,
               fp16.loss_scale_window);
  object.integer("hysteresis", -(1 << 20), 1 << 20, fp16.hysteresis);
  object.flag("consecutive_hysteresis", fp16.consecutive_hysteresis);
  object.whole("min_loss_scale", -kMostCount, kMostCount, fp16.min_loss_scale);
  object.flag("fp16_master_weights_and_grads",
              fp16.fp16_master_weights_and_grads);
}

void read_data_types(JsonObject& root, DeepSpeedConfig& config) {
  JsonObject types = section(root, "data_types");
  dtype(types, "grad_accum_dtype", true, config.grad_accum_dtype);
  std::string parameters;
  dtype(types, "param_dtype", true, parameters);
  if (parameters.empty()) return;
  const bool agrees = dtype_of(parameters) == config.dtype(DType::kF32);
  types.check(agrees, types.where("param_dtype"), ": ", parameters,
              " is not offered: the dtype of the model is that of /bf16, /fp16 "
              "or --dtype; leave it out");
  if (agrees) {
    config.remarks.push_back(
        "/data_types/param_dtype: has no effect here: /bf16, /fp16 or --dtype "
        "says the same");
  }
}

void offload(JsonObject& zero, const char* name, const char* deprecated,
             bool& is_on_host) {
  JsonObject object = section(zero, name);
  const Json* device = object.find("device");
  const bool is_nvme = device != nullptr && *device == "nvme";
  object.check(!is_nvme, object.where("device"),
               ": \"nvme\" is not offered: the book keeps no tensors in files; "
               "give none or cpu");
  std::string where = "none";
  if (!is_nvme) object.choice("device", {"none", "cpu"}, where);
  is_on_host = where == "cpu";
  bool old = false;
  zero.flag(deprecated, old);
  if (zero.find(deprecated) == nullptr) return;
  zero.check(zero.find(name) == nullptr, zero.where(deprecated),
             ": is the old name of /zero_optimization/", name,
             ", which the file has as well; keep that one");
  is_on_host = is_on_host || old;
}
void offload(Writer& zero, const char* name, const char*, bool is_on_host) {
  zero.section(name).text("device", is_on_host ? "cpu" : "none");
}

template <typename Fields>
void zero_keys(Fields& object, DeepSpeedConfig& config) {
  zero::ZeroOptions& zero = config.zero;
  object.integer("stage", 0, 3, zero.stage);
  object.flag("allgather_partitions", zero.allgather_partitions);
  object.whole("allgather_bucket_size", 0, kMostElements,
               zero.allgather_bucket_size);
  object.flag("reduce_scatter", zero.reduce_scatter);
  object.whole("reduce_bucket_size", 1, kMostElements, zero.reduce_bucket_size);
  bool overlaps = config.overlaps();
  object.flag("overlap_comm", overlaps);
  if (overlaps != config.overlaps()) config.overlap_comm = overlaps;
  object.flag("contiguous_gradients", config.contiguous_gradients);
  offload(object, "offload_optimizer", "cpu_offload", zero.offload_optimizer);
  offload(object, "offload_param", "cpu_offload_param",
          zero.offload_parameters);
  const auto of_stage_3 = [&](const std::string& name, std::int64_t& value) {
    object.also("stage3_" + name, name);
    object.whole("stage3_" + name, 0, kMostElements, value);
  };
  of_stage_3("prefetch_bucket_size", zero.prefetch_bucket_size);
  of_stage_3("param_persistence_threshold", zero.persistence_threshold);
  of_stage_3("max_live_parameters", zero.max_live_parameters);
  of_stage_3("max_reuse_distance", zero.max_reuse_distance);
  object.whole("sub_group_size", 0, kMostElements, zero.sub_group_size);
  object.flag("round_robin_gradients", zero.round_robin_gradients);
  if (!omits(object, config.computes_grad_norm)) {
    object.flag("compute_grad_norm", config.computes_grad_norm);
  }
}

/// The part of the optimizer that is on the host.
void read_ratio(JsonObject& zero, DeepSpeedConfig& config) {
  JsonObject object = section(zero, "offload_optimizer");
  double ratio = 1;
  object.number("ratio", 0, 1, ratio);
  if (object.find("ratio") == nullptr) return;
  const int stage = config.zero.stage;
  object.check(ratio == 1 || stage == 3, object.where("ratio"), ": ", ratio,
               " with /zero_optimization/stage ", stage,
               ": DeepSpeed splits the optimizer in stage 3 only; give 1, or "
               "leave it out");
  config.remarks.emplace_back(
      "/zero_optimization/offload_optimizer/ratio: has no effect here: all of "
      "the optimizer is on the host");
}

/// DeepSpeed's first form, true for stage 1.
bool read_old_zero(JsonObject& root, zero::ZeroOptions& zero) {
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

void read_zero(JsonObject& root, DeepSpeedConfig& config) {
  if (read_old_zero(root, config.zero)) return;
  JsonObject object = section(root, "zero_optimization");
  zero_keys(object, config);
  read_ratio(object, config);
  // The update runs where the shards are
  zero::ZeroOptions& zero = config.zero;
  if (zero.stage == 3 && !zero.offload_optimizer && zero.offload_parameters) {
    zero.offload_optimizer = true;
    config.remarks.emplace_back(
        "/zero_optimization/offload_param without "
        "/zero_optimization/offload_optimizer: the optimizer is on the host as "
        "well, where its shards are, and computes the same numbers");
  }
  if (object.find("compute_grad_norm") != nullptr) {
    config.remarks.emplace_back(
        "/zero_optimization/compute_grad_norm: has no effect here: the report "
        "has the norm, so it is computed in any case");
  }
}

template <typename Fields>
void pipeline_keys(Fields object, DeepSpeedConfig& config) {
  object.integer("stages", 1, 1 << 16, config.degrees.pp);
  object.text("partition", config.degrees.partition);
  object.whole("activation_checkpoint_interval", 0, kMostCount,
               config.activation_checkpoint_interval);
}

/// In DeepSpeed the section configures models that recompute; here, keys for
/// these models turn recomputation on.
void read_activations(JsonObject& root, DeepSpeedConfig& config) {
  JsonObject object = section(root, "activation_checkpointing");
  if (!has_object(root, "activation_checkpointing")) return;
  bool& asks = config.activation_checkpointing;
  for (const char* key : {"partition_activations", "cpu_checkpointing",
                          "contiguous_memory_optimization"}) {
    bool is_asked = false;
    object.flag(key, is_asked);
    asks = asks || is_asked;
  }
  const Json* number = object.find("number_checkpoints");
  std::int64_t checkpoints = 0;
  if (number != nullptr && !number->is_null()) {
    object.whole("number_checkpoints", 0, kMostCount, checkpoints);
  }
  asks = asks || checkpoints > 0;
  if (asks) return;
  config.remarks.push_back(
      "/activation_checkpointing: has no effect here: nothing in it asks for "
      "recomputation");
}

/// Sizes without a value are 0.
template <typename Fields>
void size(Fields& object, const std::string& key, std::int64_t most,
          std::int64_t& value) {
  if (!omits(object, value == 0)) object.whole(key, 1, most, value);
}

template <typename Fields>
void sizes(Fields& root, DeepSpeedConfig& config) {
  size(root, "train_batch_size", kMostCount, config.batch.train);
  size(root, "train_micro_batch_size_per_gpu", kMostCount, config.batch.micro);
  size(root, "gradient_accumulation_steps", std::int64_t{1} << 20,
       config.batch.accumulation);
  size(root, "steps_per_print", INT64_MAX, config.steps_per_print);
}

template <typename Fields>
void reduction(Fields& root, DeepSpeedConfig& config) {
  root.number("gradient_clipping", -kMostNumber, kMostNumber,
              config.gradient_clipping);
  root.flag("prescale_gradients", config.prescale_gradients);
  root.number("gradient_predivide_factor", 1e-30, kMostNumber,
              config.gradient_predivide_factor);
  dtype(root, "communication_data_type", false, config.communication_data_type);
  dtype(root, "seq_parallel_communication_data_type", false,
        config.seq_parallel_communication_data_type);
}

}  // namespace

JsonObject internal::section(JsonObject& parent, const std::string& name) {
  static const Json empty = Json::object();
  const Json* json = parent.find(name);
  return {json != nullptr ? *json : empty, parent.file(),
          parent.where(name).substr(parent.file().size() + 2),
          parent.problems()};
}

bool internal::has_object(JsonObject& parent, const std::string& name) {
  const Json* json = parent.find(name);
  return json != nullptr && json->is_object();
}

void internal::read_keys(JsonObject& root,
                         const std::vector<std::string>& parameters,
                         DeepSpeedConfig& config) {
  sizes(root, config);
  read_optimizer(root, config);
  read_scheduler(root, config);
  reduction(root, config);
  // Below 0 it is off, as at 0
  config.gradient_clipping = std::max(0.0, config.gradient_clipping);
  bf16_and_fp16(root, config);
  read_data_types(root, config);
  read_zero(root, config);
  check_parameters(root, parameters, config);
  pipeline_keys(section(root, "pipeline"), config);
  read_activations(root, config);
  read_book(root, config);
  root.flag("wall_clock_breakdown", config.wall_clock_breakdown);
}

void internal::write_keys(DeepSpeedConfig config,
                          nlohmann::ordered_json& json) {
  Writer root(json);
  sizes(root, config);
  write_optimizer(root, config);
  reduction(root, config);
  if (!config.grad_accum_dtype.empty()) {
    section(root, "data_types")
        .text("grad_accum_dtype", config.grad_accum_dtype);
  }
  bf16_and_fp16(root, config);
  Writer zero = section(root, "zero_optimization");
  zero_keys(zero, config);
  pipeline_keys(section(root, "pipeline"), config);
  if (config.activation_checkpointing) {
    section(root, "activation_checkpointing")
        .flag("partition_activations", true);
  }
  write_book(root, config);
  root.flag("wall_clock_breakdown", config.wall_clock_breakdown);
}

}  // namespace shardbook::engine
