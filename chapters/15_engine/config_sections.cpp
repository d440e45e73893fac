// The sections of a config, in the order of the page's table.

#include <algorithm>
#include <cctype>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "chapters/15_engine/internal/config_rules.h"
#include "sim/json_object.h"

namespace shardbook::engine {
namespace {

using json_file::Json;
using json_file::JsonObject;

constexpr std::int64_t kMostSamples = std::int64_t{1} << 40;
constexpr std::int64_t kMostElements = std::int64_t{1} << 50;
constexpr double kMost = 1e30;

/// A section of the file; an empty one where the file has none.
struct Section {
  Section(JsonObject& parent, const std::string& name)
      : json(parent.find(name)),
        object(json != nullptr ? *json : empty(), parent.file(),
               parent.where(name).substr(parent.file().size() + 2),
               parent.problems()) {}
  static const Json& empty() {
    static const Json object = Json::object();
    return object;
  }

  bool is_object() const { return json != nullptr && json->is_object(); }

  const Json* json;
  JsonObject object;
};

std::string lower_case(std::string text) {
  for (char& c : text) {
    c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  return text;
}

/// The usual case of a type; DeepSpeed accepts any.
std::string with_usual_case(const std::string& type) {
  const std::string lower = lower_case(type);
  return lower == "adam" ? "Adam" : lower == "adamw" ? "AdamW" : type;
}

void read_type(JsonObject& section, const std::vector<std::string>& offered,
               const std::vector<std::string>& others,
               const std::string& difference, std::string& type) {
  const Json* json = section.find("type");
  const std::string names = json_file::list(offered);
  section.check(json != nullptr, section.where("type"), ": missing; give ",
                names);
  if (json == nullptr) return;
  std::string given;
  section.text("type", given);
  if (given.empty()) return;
  given = with_usual_case(given);
  const auto is_in = [&](const std::vector<std::string>& list) {
    return std::find(list.begin(), list.end(), given) != list.end();
  };
  section.check(!is_in(others), section.where("type"), ": \"", given,
                "\" is DeepSpeed's, but not offered: ", difference, "; give ",
                names);
  section.check(is_in(others) || is_in(offered), section.where("type"), ": \"",
                json_file::printable(given), "\" is unknown; give ", names);
  if (is_in(offered)) type = given;
}

/// Refuses keys that only another type has.
void refuse_others(const Section& params, const std::string& type,
                   const std::vector<std::string>& own) {
  if (!params.is_object()) return;
  for (const auto& [key, value] : params.json->items()) {
    const bool is_own = std::find(own.begin(), own.end(), key) != own.end();
    params.object.check(is_own, params.object.where(key), ": ", type,
                        " has no such parameter; leave it out, or give ",
                        json_file::list(own));
  }
}

void read_betas(JsonObject& object, OptimizerOptions& to) {
  const Json* betas = object.find("betas");
  if (betas == nullptr) return;
  const std::string where = object.where("betas");
  const bool is_pair = betas->is_array() && betas->size() == 2;
  object.check(is_pair, where, ": ", json_file::printable(*betas),
               " is not allowed; give two numbers below 1, such as "
               "[0.9, 0.999]");
  if (!is_pair) return;
  const double below_1 = std::nextafter(1.0, 0.0);
  const std::string names[] = {"0", "1"};
  double* const values[] = {&to.beta1, &to.beta2};
  for (std::size_t i = 0; i < 2; ++i) {
    const Json pair = {{names[i], (*betas)[i]}};
    JsonObject(pair, object.file(), where.substr(object.file().size() + 2),
               object.problems())
        .number(names[i], 0, below_1, *values[i]);
  }
}

void read_optimizer(JsonObject& root, OptimizerConfig& optimizer,
                    std::vector<std::string>& remarks) {
  Section section(root, "optimizer");
  if (!section.is_object()) return;
  read_type(
      section.object, {"Adam", "AdamW", "SGD"},
      {"Lamb",        "LAMB",       "lamb",       "OneBitAdam", "OnebitAdam",
       "onebitadam",  "OneBitLamb", "OnebitLamb", "onebitlamb", "ZeroOneAdam",
       "zerooneadam", "Adagrad",    "adagrad",    "Lion",       "lion",
       "MuAdam",      "muadam",     "MuAdamW",    "muadamw",    "MuSGD",
       "musgd",       "Muon",       "muon"},
      "its updates are other ones", optimizer.type);
  Section params(section.object, "params");
  JsonObject& object = params.object;
  OptimizerOptions& to = optimizer.params;
  object.number("lr", 0, kMost, to.lr);
  object.number("weight_decay", 0, kMost, to.weight_decay);
  if (optimizer.type == "SGD") {
    refuse_others(params, "SGD",
                  {"lr", "weight_decay", "momentum", "dampening", "nesterov"});
    object.number("momentum", 0, 1, to.momentum);
    object.number("dampening", 0, 1, to.dampening);
    object.flag("nesterov", to.nesterov);
    object.check(!to.nesterov || (to.momentum > 0 && to.dampening == 0),
                 object.where("nesterov"),
                 ": true needs a momentum above 0 and a dampening of 0");
  } else if (!optimizer.type.empty()) {
    refuse_others(params, optimizer.type,
                  {"lr", "weight_decay", "betas", "eps", "adam_w_mode"});
    object.number("eps", 0, kMost, to.eps);
    read_betas(object, to);
    bool adam_w_mode = true;
    object.flag("adam_w_mode", adam_w_mode);
    if (optimizer.type == "Adam") {
      optimizer.adam_w_mode = adam_w_mode;
    } else if (object.find("adam_w_mode") != nullptr) {
      remarks.push_back(
          "/optimizer/params/adam_w_mode: has no effect here: AdamW is AdamW "
          "with or without it");
    }
  }
}

void read_scheduler(JsonObject& root, SchedulerConfig& scheduler) {
  Section section(root, "scheduler");
  if (!section.is_object()) return;
  read_type(section.object, {"WarmupLR", "WarmupDecayLR"},
            {"LRRangeTest", "OneCycle", "WarmupCosineLR"},
            "its rates are other ones", scheduler.type);
  const bool decays = scheduler.type == "WarmupDecayLR";
  Section params(section.object, "params");
  if (scheduler.type.empty()) return;
  JsonObject& object = params.object;
  object.number("warmup_min_lr", 0, kMost, scheduler.warmup_min_lr);
  double most = 1e-3;
  const bool is_given = object.find("warmup_max_lr") != nullptr;
  object.number("warmup_max_lr", 0, kMost, most);
  if (is_given || decays) scheduler.warmup_max_lr = most;
  object.whole("warmup_num_steps", 0, kMostSamples, scheduler.warmup_num_steps);
  object.choice("warmup_type", {"log", "linear"}, scheduler.warmup_type);
  std::vector<std::string> own = {"warmup_min_lr", "warmup_max_lr",
                                  "warmup_num_steps", "warmup_type"};
  if (decays) {
    own.emplace_back("total_num_steps");
    object.check(
        object.find("total_num_steps") != nullptr,
        object.where("total_num_steps"),
        ": missing; WarmupDecayLR needs the step at which the rate has "
        "come down");
    object.whole("total_num_steps", 1, kMostSamples, scheduler.total_num_steps);
  }
  refuse_others(params, scheduler.type, own);
}

/// Names of dtypes as DeepSpeed accepts them: "bf16", "FP32", "torch.float16".
void read_dtype(JsonObject& object, const std::string& key,
                std::string& value) {
  std::string name;
  object.text(key, name);
  if (name.empty()) return;
  std::string lower = lower_case(name);
  if (lower.rfind("torch.", 0) == 0) lower = lower.substr(6);
  const std::map<std::string, std::string> usual = {
      {"float32", "fp32"},  {"float", "fp32"}, {"fp32", "fp32"},
      {"float16", "fp16"},  {"half", "fp16"},  {"fp16", "fp16"},
      {"bfloat16", "bf16"}, {"bf16", "bf16"}};
  const auto found = usual.find(lower);
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
  object.integer("initial_scale_power", 0, 100, fp16.initial_scale_power);
  object.whole("loss_scale_window", 1, kMostSamples, fp16.loss_scale_window);
  object.integer("hysteresis", 1, 1 << 20, fp16.hysteresis);
  object.flag("consecutive_hysteresis", fp16.consecutive_hysteresis);
  object.number("min_loss_scale", 0, kMost, fp16.min_loss_scale);
  object.flag("fp16_master_weights_and_grads",
              fp16.fp16_master_weights_and_grads);

  Section types(root, "data_types");
  read_dtype(types.object, "grad_accum_dtype", config.grad_accum_dtype);
  std::string parameters;
  read_dtype(types.object, "param_dtype", parameters);
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
  section.object.choice("device", {"none", "cpu"}, offload.device);
  section.object.flag("pin_memory", offload.pin_memory);
  bool old = false;
  zero.flag(deprecated, old);
  if (zero.find(deprecated) == nullptr) return;
  zero.check(section.json == nullptr, zero.where(deprecated),
             ": is the old name of /zero_optimization/", name,
             ", which the file has as well; keep that one");
  if (old) offload.device = "cpu";
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
  object.whole("reduce_bucket_size", 0, kMostElements, zero.reduce_bucket_size);
  bool overlaps = zero.overlaps();
  object.flag("overlap_comm", overlaps);
  if (object.find("overlap_comm") != nullptr) zero.overlap_comm = overlaps;
  object.flag("contiguous_gradients", zero.contiguous_gradients);
  read_offload(object, "offload_optimizer", "cpu_offload",
               zero.offload_optimizer);
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
void read_parallel_names(JsonObject& root, BookConfig& to) {
  Section autotp(root, "tensor_parallel");
  autotp.object.integer("autotp_size", 0, 1 << 16, to.tensor_parallel);
  to.tensor_parallel = std::max(to.tensor_parallel, 1);
  root.integer("sequence_parallel_size", 1, 1 << 16, to.context_parallel);
  if (root.find("sequence_parallel_size") != nullptr) {
    to.context_parallel_kind = "ulysses";
  }
  root.flag("use_data_before_expert_parallelism",
            to.use_data_before_expert_parallelism);
}

void read_book(JsonObject& root, BookConfig& to) {
  read_parallel_names(root, to);
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

void internal::read_keys(JsonObject& root, DeepSpeedConfig& config) {
  root.whole("train_batch_size", 1, kMostSamples, config.batch.train);
  root.whole("train_micro_batch_size_per_gpu", 1, kMostSamples,
             config.batch.micro);
  root.whole("gradient_accumulation_steps", 1, std::int64_t{1} << 20,
             config.batch.accumulation);
  root.whole("steps_per_print", 0, INT64_MAX, config.steps_per_print);
  read_optimizer(root, config.optimizer, config.remarks);
  read_scheduler(root, config.scheduler);
  root.number("gradient_clipping", 0, kMost, config.gradient_clipping);
  root.flag("prescale_gradients", config.prescale_gradients);
  root.number("gradient_predivide_factor", 1e-30, kMost,
              config.gradient_predivide_factor);
  read_dtype(root, "communication_data_type", config.communication_data_type);
  read_dtype(root, "seq_parallel_communication_data_type",
             config.seq_parallel_communication_data_type);
  read_precision(root, config);
  read_zero(root, config.zero, config.remarks);
  read_pipeline(root, config.pipeline);
  read_activations(root, config);
  read_book(root, config.book);
  root.flag("wall_clock_breakdown", config.wall_clock_breakdown);
}

}  // namespace shardbook::engine
