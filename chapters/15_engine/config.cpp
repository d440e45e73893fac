// Reading a config: one function per section, in the order of the page's table.

#include "chapters/15_engine/config.h"

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "chapters/15_engine/internal/config_rules.h"
#include "chapters/common/models/data.h"
#include "core/check.h"
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
               parent.where(name).substr(parent.file().size() + 2)) {}
  static const Json& empty() {
    static const Json object = Json::object();
    return object;
  }

  const Json* json;
  JsonObject object;
};

/// Keys of DeepSpeed's optimizers that name something this book has not.
void refuse_optimizer_keys(JsonObject& params) {
  SB_CHECK(params.find("max_grad_norm") == nullptr,
           params.where("max_grad_norm"),
           ": gradients are clipped by the engine, not by the optimizer; give "
           "/gradient_clipping in place of it");
  bool amsgrad = false, bias_correction = true;
  params.flag("amsgrad", amsgrad);
  params.flag("bias_correction", bias_correction);
  SB_CHECK(!amsgrad, params.where("amsgrad"),
           ": true is not offered; leaving the key out changes the numbers: "
           "steps are divided by the second moment, not by its maximum so far");
  SB_CHECK(bias_correction, params.where("bias_correction"),
           ": false is not offered; leaving the key out changes the numbers: "
           "moments are then divided by 1 - beta^step, as DeepSpeed's are "
           "without the key");
}

void read_optimizer(JsonObject& root, OptimizerConfig& optimizer) {
  Section section(root, "optimizer");
  if (section.json == nullptr) return;
  SB_CHECK(section.object.find("type") != nullptr, section.object.where("type"),
           ": missing; give \"Adam\", \"AdamW\" or \"SGD\"");
  section.object.choice("type", {"Adam", "AdamW", "SGD"}, optimizer.type);
  Section params(section.object, "params");
  JsonObject& object = params.object;
  refuse_optimizer_keys(object);
  OptimizerOptions& to = optimizer.params;
  object.number("lr", 0, kMost, to.lr);
  object.number("weight_decay", 0, kMost, to.weight_decay);
  if (optimizer.type == "SGD") {
    object.number("momentum", 0, 1, to.momentum);
    object.number("dampening", 0, 1, to.dampening);
    object.flag("nesterov", to.nesterov);
    SB_CHECK(!to.nesterov || (to.momentum > 0 && to.dampening == 0),
             object.where("nesterov"),
             ": true needs a momentum above 0 and a dampening of 0");
  } else {
    object.number("eps", 0, kMost, to.eps);
    if (const Json* betas = object.find("betas")) {
      const std::string where = object.where("betas");
      SB_CHECK(betas->is_array() && betas->size() == 2, where, ": ",
               json_file::printable(*betas),
               " is not allowed; give two numbers below 1, such as "
               "[0.9, 0.999]");
      const double below_1 = std::nextafter(1.0, 0.0);
      to.beta1 = json_file::number_at((*betas)[0], where + "/0", 0, below_1);
      to.beta2 = json_file::number_at((*betas)[1], where + "/1", 0, below_1);
    }
    if (optimizer.type == "Adam") {
      object.flag("adam_w_mode", optimizer.adam_w_mode);
    }
  }
  object.finish();
  section.object.finish();
}

void read_scheduler(JsonObject& root, SchedulerConfig& scheduler) {
  Section section(root, "scheduler");
  if (section.json == nullptr) return;
  SB_CHECK(section.object.find("type") != nullptr, section.object.where("type"),
           ": missing; give \"WarmupLR\" or \"WarmupDecayLR\"");
  section.object.choice("type", {"WarmupLR", "WarmupDecayLR"}, scheduler.type);
  const bool decays = scheduler.type == "WarmupDecayLR";
  Section params(section.object, "params");
  JsonObject& object = params.object;
  object.number("warmup_min_lr", 0, kMost, scheduler.warmup_min_lr);
  double most = 1e-3;
  const bool is_given = object.find("warmup_max_lr") != nullptr;
  object.number("warmup_max_lr", 0, kMost, most);
  if (is_given || decays) scheduler.warmup_max_lr = most;
  object.whole("warmup_num_steps", 0, kMostSamples, scheduler.warmup_num_steps);
  object.choice("warmup_type", {"log", "linear"}, scheduler.warmup_type);
  if (decays) {
    SB_CHECK(object.find("total_num_steps") != nullptr,
             object.where("total_num_steps"),
             ": missing; WarmupDecayLR needs the step at which the rate has "
             "come down");
    object.whole("total_num_steps", 1, kMostSamples, scheduler.total_num_steps);
  }
  object.finish();
  section.object.finish();
}

void read_precision(JsonObject& root, DeepSpeedConfig& config) {
  Section bf16(root, "bf16");
  bf16.object.flag("enabled", config.bf16);
  bf16.object.finish();

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
  object.finish();
}

void read_offload(JsonObject& zero, const std::string& name,
                  const std::string& deprecated, OffloadConfig& offload) {
  Section section(zero, name);
  section.object.choice("device", {"none", "cpu"}, offload.device);
  section.object.flag("pin_memory", offload.pin_memory);
  section.object.finish();
  bool old = false;
  zero.flag(deprecated, old);
  if (zero.find(deprecated) == nullptr) return;
  SB_CHECK(section.json == nullptr, zero.where(deprecated),
           ": is the old name of /zero_optimization/", name,
           ", which the file has as well; keep that one");
  if (old) offload.device = "cpu";
}

void read_zero(JsonObject& root, ZeroConfig& zero) {
  Section section(root, "zero_optimization");
  JsonObject& object = section.object;
  object.integer("stage", 0, 3, zero.stage);
  object.flag("allgather_partitions", zero.allgather_partitions);
  object.whole("allgather_bucket_size", 1, kMostElements,
               zero.allgather_bucket_size);
  object.flag("reduce_scatter", zero.reduce_scatter);
  object.whole("reduce_bucket_size", 1, kMostElements, zero.reduce_bucket_size);
  bool overlaps = zero.overlaps();
  object.flag("overlap_comm", overlaps);
  if (object.find("overlap_comm") != nullptr) zero.overlap_comm = overlaps;
  object.flag("contiguous_gradients", zero.contiguous_gradients);
  read_offload(object, "offload_optimizer", "cpu_offload",
               zero.offload_optimizer);
  read_offload(object, "offload_param", "cpu_offload_param",
               zero.offload_param);
  object.whole("stage3_prefetch_bucket_size", 0, kMostElements,
               zero.stage3_prefetch_bucket_size);
  object.whole("stage3_param_persistence_threshold", 0, kMostElements,
               zero.stage3_param_persistence_threshold);
  object.whole("stage3_max_live_parameters", 1, kMostElements,
               zero.stage3_max_live_parameters);
  object.whole("stage3_max_reuse_distance", 0, kMostElements,
               zero.stage3_max_reuse_distance);
  object.whole("sub_group_size", 1, kMostElements, zero.sub_group_size);
  object.flag("round_robin_gradients", zero.round_robin_gradients);
  object.finish();
}

void read_pipeline(JsonObject& root, PipelineConfig& pipeline) {
  Section section(root, "pipeline");
  JsonObject& object = section.object;
  object.integer("stages", 1, 1 << 16, pipeline.stages);
  object.text("partition", pipeline.partition);
  object.whole("activation_checkpoint_interval", 0, kMostSamples,
               pipeline.activation_checkpoint_interval);
  object.finish();
}

void read_experts(JsonObject& book, BookConfig& to) {
  Section section(book, "experts");
  if (section.json == nullptr) return;
  JsonObject& object = section.object;
  const Json* counts = object.find("num_experts");
  const std::string where = object.where("num_experts");
  SB_CHECK(counts != nullptr, where,
           ": missing; give a number of experts, or a list with one for each "
           "layer");
  const Json list = counts->is_array() ? *counts : Json::array({*counts});
  SB_CHECK(!list.empty() && list.size() <= 4096, where,
           ": give a number, or a list of 1 to 4096 numbers");
  for (const Json& each : list) {
    to.num_experts.push_back(
        static_cast<int>(json_file::integer_at(each, where, 1, 1 << 20)));
  }
  object.integer("ep_size", 0, 1 << 16, to.ep_size);
  object.integer("top_k", 1, 1 << 16, to.top_k);
  object.number("capacity_factor", 0.01, kMost, to.capacity_factor);
  object.integer("min_capacity", 0, 1 << 30, to.min_capacity);
  object.flag("use_residual", to.use_residual);
  object.flag("use_data_before_expert_parallelism",
              to.use_data_before_expert_parallelism);
  object.flag("enable_expert_tensor_parallelism",
              to.enable_expert_tensor_parallelism);
  object.finish();
}

void read_book(JsonObject& root, BookConfig& to) {
  // DeepSpeed's own name for tensor parallelism
  Section autotp(root, "tensor_parallel");
  autotp.object.integer("autotp_size", 1, 1 << 16, to.tensor_parallel);
  autotp.object.finish();

  Section section(root, "shardbook");
  JsonObject& object = section.object;
  Section tensor(object, "tensor_parallel");
  SB_CHECK(tensor.json == nullptr || autotp.json == nullptr,
           object.where("tensor_parallel"),
           ": /tensor_parallel/autotp_size is in the file as well; keep one of "
           "them");
  tensor.object.integer("size", 1, 1 << 16, to.tensor_parallel);
  tensor.object.choice("mode", {"1d", "2d", "2.5d", "3d"},
                       to.tensor_parallel_mode);
  tensor.object.integer("depth", 1, 1 << 16, to.tensor_parallel_depth);
  tensor.object.flag("sequence_parallel", to.sequence_parallel);
  tensor.object.finish();
  Section context(object, "context_parallel");
  context.object.integer("size", 1, 1 << 16, to.context_parallel);
  context.object.choice("kind", {"ring", "rsa", "ulysses"},
                        to.context_parallel_kind);
  context.object.choice("layout", {"contiguous", "zigzag", "striped"},
                        to.context_parallel_layout);
  context.object.finish();
  object.text("schedule", to.schedule);
  object.integer("chunks", 2, 1 << 16, to.chunks);
  object.choice("recompute", {"never", "attention", "blocks"}, to.recompute);
  object.choice("sharding", {"zero", "fsdp", "fsdp2"}, to.sharding);
  read_experts(object, to);
  object.finish();
}

/// "auto" has a better message than "not a number".
void refuse_auto(const Json& json, const std::string& where, int depth) {
  if (!json.is_object() || depth > 4) return;
  for (const auto& [key, value] : json.items()) {
    const std::string here = where + "/" + json_file::printable(key);
    SB_CHECK(!value.is_string() || value != "auto", here,
             ": \"auto\" is for front ends, which know a value for some keys, "
             "and none has filled it; give a value");
    refuse_auto(value, here, depth + 1);
  }
}

}  // namespace

DeepSpeedConfig DeepSpeedConfig::parse(const std::string& text,
                                       const std::string& label) {
  const std::string problem = utf8_problem(text);
  SB_CHECK(problem.empty(), label, ": ", problem);
  SB_CHECK(text.size() < (1 << 20), label, ": longer than 1 MiB");
  const Json json = json_file::parse_json(text, label);
  JsonObject root(json, label, "");
  refuse_auto(json, label + ": ", 0);
  DeepSpeedConfig config;
  config.label = label;
  root.whole("train_batch_size", 1, kMostSamples, config.batch.train);
  root.whole("train_micro_batch_size_per_gpu", 1, kMostSamples,
             config.batch.micro);
  root.whole("gradient_accumulation_steps", 1, std::int64_t{1} << 20,
             config.batch.accumulation);
  root.whole("steps_per_print", 1, kMostSamples, config.steps_per_print);
  read_optimizer(root, config.optimizer);
  read_scheduler(root, config.scheduler);
  root.number("gradient_clipping", 0, kMost, config.gradient_clipping);
  root.flag("prescale_gradients", config.prescale_gradients);
  root.number("gradient_predivide_factor", 1e-30, kMost,
              config.gradient_predivide_factor);
  root.choice("communication_data_type", {"fp32", "fp16", "bf16"},
              config.communication_data_type);
  read_precision(root, config);
  read_zero(root, config.zero);
  read_pipeline(root, config.pipeline);
  read_book(root, config.book);
  root.flag("wall_clock_breakdown", config.wall_clock_breakdown);
  const bool has_clipping = root.find("gradient_clipping") != nullptr;
  root.finish();
  internal::check_rules(config);
  config.remarks = internal::remarks_of(config, has_clipping);
  return config;
}

DeepSpeedConfig DeepSpeedConfig::read(const std::string& file) {
  if (file.rfind('{', 0) == 0) return parse(file, "--config");
  return parse(internal::read_config_file("--config", file), file);
}

std::string internal::read_config_file(const std::string& option,
                                       const std::string& file) {
  std::ifstream in(file, std::ios::binary);
  std::ostringstream text;
  // A folder opens as a file does, and gives nothing
  text << in.rdbuf();
  SB_CHECK(in && !text.str().empty(), option, " ", file,
           ": cannot be read, or is empty; give a JSON file with DeepSpeed's "
           "keys");
  return text.str();
}

}  // namespace shardbook::engine
