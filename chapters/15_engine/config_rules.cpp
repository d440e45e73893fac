// Rules over several keys: batch arithmetic, and illegal combinations.

#include "chapters/15_engine/internal/config_rules.h"

#include <algorithm>
#include <cmath>
#include <sstream>

#include "core/check.h"

namespace shardbook::engine {

namespace {

/// The parts of a batch that were given: "gradient_accumulation_steps 2 x
/// data-parallel ranks 4".
std::string parts_of(const BatchSizes& given, std::int64_t dp) {
  std::string text;
  const auto add = [&](const char* key, std::int64_t value) {
    if (value > 0) text += key + std::to_string(value) + " x ";
  };
  add("train_micro_batch_size_per_gpu ", given.micro);
  add("gradient_accumulation_steps ", given.accumulation);
  return text + "data-parallel ranks " + std::to_string(dp);
}

}  // namespace

BatchSizes resolve_batch(const BatchSizes& given, std::int64_t dp,
                         const std::string& train_key) {
  BatchSizes all = given;
  SB_CHECK(given.train > 0 || given.micro > 0,
           given.accumulation > 0
               ? "gradient_accumulation_steps " +
                     std::to_string(given.accumulation) +
                     " alone does not say how large a batch is"
               : std::string("the config does not say how large a batch is"),
           "; give train_batch_size, train_micro_batch_size_per_gpu, or both");
  // One number: no accumulation
  if (all.accumulation == 0 && (all.train == 0 || all.micro == 0)) {
    all.accumulation = 1;
  }
  // No product overflows
  const double samples = static_cast<double>(all.micro) *
                         static_cast<double>(all.accumulation) *
                         static_cast<double>(dp);
  const std::string parts_text = parts_of(given, dp);
  SB_CHECK(samples < 1e15, parts_text,
           ": too many samples for a batch; give fewer");

  // Two numbers give the third
  if (all.train == 0) {
    all.train = all.micro * all.accumulation * dp;
  } else if (all.micro == 0) {
    all.micro = all.train / (all.accumulation * dp);
  } else if (all.accumulation == 0) {
    all.accumulation = all.train / (all.micro * dp);
  }

  // A remainder shows in the product
  const std::int64_t parts = all.accumulation * dp;
  const bool has_all = given.micro > 0 && given.accumulation > 0;
  SB_CHECK(all.micro > 0 && parts > 0 && all.train % parts == 0 &&
               all.train / parts == all.micro,
           train_key, " ", all.train, " is not ",
           has_all ? "" : "a multiple of ", parts_text, "; give ",
           has_all ? "" : "a multiple of ",
           std::max<std::int64_t>(given.micro, 1) *
               std::max<std::int64_t>(given.accumulation, 1) * dp);
  return all;
}

std::string OptimizerConfig::name() const {
  if (type == "SGD") return "sgd";
  return type == "AdamW" || adam_w_mode ? "adamw" : "adam";
}

LossScaleOptions Fp16Config::scale() const {
  LossScaleOptions options;
  if (!is_dynamic()) {
    // Equal limits fix the scale; Megatron's raises no error at the lower one
    options.scale = options.min_scale = loss_scale;
    options.window = std::int64_t{1} << 60;
    options.kind = ScalerKind::kMegatron;
    return options;
  }
  options.scale = std::ldexp(1.0, initial_scale_power);
  options.window = loss_scale_window;
  options.hysteresis = hysteresis;
  options.min_scale = min_loss_scale;
  options.consecutive_hysteresis = consecutive_hysteresis;
  return options;
}

DType DeepSpeedConfig::dtype(DType otherwise) const {
  if (fp16.enabled) return DType::kF16;
  return bf16 ? DType::kBF16 : otherwise;
}

DType dtype_of(const std::string& name) {
  return name == "fp16"   ? DType::kF16
         : name == "bf16" ? DType::kBF16
                          : DType::kF32;
}

std::optional<DType> DeepSpeedConfig::wire() const {
  if (communication_data_type.empty()) return std::nullopt;
  return dtype_of(communication_data_type);
}

std::string DeepSpeedConfig::recompute() const {
  // DeepSpeed's pipelines have a key of their own; experts and 2D to 3D layers
  // keep all activations
  const bool may = pipeline.stages == 1 && book.num_experts.empty() &&
                   book.tensor_parallel_mode == "1d" &&
                   pipeline.activation_checkpoint_interval == 0;
  return activation_checkpointing && may && book.recompute == "never"
             ? "blocks"
             : book.recompute;
}

std::string internal::noise_name(const BookConfig& book) {
  const std::string& policy = book.noisy_gate_policy;
  return policy == "Jitter"    ? "jitter"
         : policy == "RSample" ? "rsample"
                               : "none";
}

bool sums_in_f32(const DeepSpeedConfig& config, DType dtype, std::int64_t g) {
  const std::string& name = config.grad_accum_dtype;
  if (name.empty() || g == 1 || dtype_of(name) == dtype) return false;
  SB_CHECK(dtype_of(name) == DType::kF32 && dtype != DType::kF64, config.label,
           ": /data_types/grad_accum_dtype \"", name, "\" in ",
           dtype_name(dtype),
           ": sums would have fewer digits than what is summed; leave the key "
           "out");
  return true;
}

bool DeepSpeedConfig::divides_first() const {
  if (prescale_gradients || zero.stage == 3) return true;
  return zero.stage > 0 && zero.reduce_scatter;
}

namespace internal {
namespace {

/// Collects errors.
struct Rules {
  template <typename... Parts>
  void check(bool holds, const Parts&... parts) {
    if (holds) return;
    std::ostringstream message;
    message << label << ": ";
    (message << ... << parts);
    broken.push_back(message.str());
  }
  const std::string& label;
  std::vector<std::string> broken = {};
};

void check_offload(const DeepSpeedConfig& config, Rules& rules) {
  const ZeroConfig& zero = config.zero;
  const std::string stage =
      "/zero_optimization/stage " + std::to_string(zero.stage);
  const bool optimizer = zero.offload_optimizer.device != "none";
  const bool parameters = zero.offload_param.device != "none";
  rules.check(
      !optimizer || zero.stage >= 2,
      "/zero_optimization/offload_optimizer with ", stage,
      zero.stage == 0
          ? ": no optimizer is sharded"
          : ": whole gradients stay on the device, so nothing streams to "
            "the host",
      "; give stage 2 or 3");
  rules.check(!parameters || zero.stage == 3,
              "/zero_optimization/offload_param with ", stage,
              ": only stage 3 shards parameters; give stage 3");
  rules.check(!config.fp16.fp16_master_weights_and_grads ||
                  (config.fp16.enabled && zero.stage == 2 && optimizer),
              "/fp16/fp16_master_weights_and_grads with ", stage,
              ": only ZeRO-2 whose optimizer is on the host keeps f16 masters; "
              "give /fp16/enabled true, stage 2 and "
              "/zero_optimization/offload_optimizer {\"device\": \"cpu\"}");
}

/// How gradients are divided, and what is sent.
void check_reduction(const DeepSpeedConfig& config, Rules& rules) {
  const ZeroConfig& zero = config.zero;
  rules.check(
      !config.prescale_gradients || config.gradient_predivide_factor == 1,
      "/gradient_predivide_factor ", config.gradient_predivide_factor,
      " with /prescale_gradients true: gradients are divided by all ranks "
      "before the sum; leave one of them out");
  const bool is_default =
      !config.prescale_gradients && config.gradient_predivide_factor == 1;
  const char* const key = config.prescale_gradients
                              ? "/prescale_gradients true"
                              : "/gradient_predivide_factor";
  const bool sums_all =
      zero.stage == 0 || (zero.stage < 3 && !zero.reduce_scatter);
  rules.check(
      is_default || sums_all, key, " with /zero_optimization/stage ",
      zero.stage,
      zero.stage < 3 ? " and /zero_optimization/reduce_scatter true" : "",
      ": ZeRO divides by its ranks before it reduces; leave it out");
  rules.check(
      zero.allgather_partitions || zero.stage == 1 || zero.stage == 2,
      "/zero_optimization/allgather_partitions false with "
      "/zero_optimization/stage ",
      zero.stage,
      ": no updated parameters are gathered after a step; leave it out");
}

void check_pipeline(const DeepSpeedConfig& config, Rules& rules) {
  const int stage = config.zero.stage;
  rules.check(
      stage <= 1 || config.pipeline.stages == 1, "/zero_optimization/stage ",
      stage, " with /pipeline/stages ", config.pipeline.stages,
      stage == 2
          ? ": a stage sums gradients over all micro-batches, so shards "
            "of them would be reduced after each one, m times the traffic"
          : ": each micro-batch would gather the stage's parameters for "
            "its forward and again for its backward, 2m times",
      "; give stage 1");
}

void check_book(const DeepSpeedConfig& config, Rules& rules) {
  const BookConfig& book = config.book;
  rules.check(book.sharding == "zero" || config.zero.stage == 3,
              "/shardbook/sharding \"", book.sharding,
              "\" with /zero_optimization/stage ", config.zero.stage,
              ": FSDP shards parameters as stage 3 does; give stage 3");
  rules.check(
      book.tensor_parallel_mode == "2.5d" || book.tensor_parallel_depth == 1,
      "/shardbook/tensor_parallel/depth ", book.tensor_parallel_depth,
      " with mode \"", book.tensor_parallel_mode, "\": only 2.5d has a depth");
  rules.check(book.recompute == "never" ||
                  config.pipeline.activation_checkpoint_interval == 0,
              "/shardbook/recompute \"", book.recompute,
              "\" with /pipeline/activation_checkpoint_interval ",
              config.pipeline.activation_checkpoint_interval,
              ", which runs whole stages again; keep one of them");
  rules.check(config.zero.stage < 3 || book.num_experts.empty(),
              "/shardbook/experts with /zero_optimization/stage 3: experts are "
              "not whole on any rank, and stage 3 would gather them for every "
              "micro-batch; give stage 1 or 2");
  rules.check(book.noisy_gate_policy != "RSample" || book.top_k == 1,
              "/shardbook/experts/noisy_gate_policy \"RSample\" with "
              "/shardbook/experts/top_k ",
              book.top_k,
              ": it samples the one choice of a top-1 gate; give top_k 1, or "
              "\"Jitter\"");
}

}  // namespace

std::vector<std::string> broken_rules(const DeepSpeedConfig& config) {
  Rules rules = {config.label};
  rules.check(!config.bf16 || !config.fp16.enabled,
              "/bf16/enabled and /fp16/enabled are both true; keep one");
  check_offload(config, rules);
  check_reduction(config, rules);
  check_pipeline(config, rules);
  check_book(config, rules);
  const SchedulerConfig& scheduler = config.scheduler;
  rules.check(scheduler.total_num_steps == 0 ||
                  scheduler.total_num_steps >= scheduler.warmup_num_steps,
              "/scheduler/params/total_num_steps ", scheduler.total_num_steps,
              " comes before /scheduler/params/warmup_num_steps ",
              scheduler.warmup_num_steps);
  rules.check(
      !scheduler.warmup_max_lr ||
          *scheduler.warmup_max_lr >= scheduler.warmup_min_lr,
      "/scheduler/params/warmup_max_lr ", scheduler.warmup_max_lr.value_or(0),
      " is below /scheduler/params/warmup_min_lr ", scheduler.warmup_min_lr);
  return rules.broken;
}

std::vector<std::string> remarks_of(const DeepSpeedConfig& config,
                                    bool has_clipping) {
  std::vector<std::string> remarks;
  const auto say = [&](const std::string& text) { remarks.push_back(text); };
  if (config.optimizer.type == "Adam") {
    say(config.optimizer.adam_w_mode
            ? "Adam: this run uses AdamW, as DeepSpeed does unless adam_w_mode "
              "is false"
            : "Adam with adam_w_mode false: this run adds weight decay to the "
              "gradient");
  }
  if (!has_clipping) say(kClippingRemark);
  if (config.activation_checkpointing) {
    say(config.recompute() != "never"
            ? "activation_checkpointing: " + config.recompute() +
                  ", where the model has them, run forward again in backward, "
                  "from inputs that stay where they are"
            : "/activation_checkpointing: has no effect here: pipelines have "
              "activation_checkpoint_interval, experts and 2D to 3D layers "
              "keep all activations");
  }
  if (!config.seq_parallel_communication_data_type.empty() &&
      config.book.context_parallel == 1) {
    say("/seq_parallel_communication_data_type: has no effect here: no ranks "
        "share a sample");
  }
  if (config.book.context_parallel > 1 &&
      config.dtype(DType::kF32) != DType::kF32) {
    say("gradients are summed over the ranks that share a sample in the dtype "
        "of training; DeepSpeed sums them in fp32 unless "
        "seq_parallel_communication_data_type says otherwise");
  }
  if (config.book.use_data_before_expert_parallelism &&
      config.book.num_experts.empty()) {
    say("/use_data_before_expert_parallelism: has no effect here: there are no "
        "experts");
  }
  if (config.scheduler.type == "WarmupLR" && !config.scheduler.warmup_max_lr) {
    say("warmup_max_lr is not given: the optimizer's lr; DeepSpeed before "
        "0.17.2 takes 0.001");
  }
  if (config.fp16.enabled && config.fp16.is_dynamic()) {
    say("fp16: the loss scale begins at 2^" +
        std::to_string(config.fp16.initial_scale_power) +
        " and doubles after " + std::to_string(config.fp16.loss_scale_window) +
        " good steps; DeepSpeed from 0.17.1 on doubles it one step later, and "
        "older versions begin at 2^32 where the section has no such key");
  }
  if (config.zero.sub_group_size == 0) {
    say("sub_group_size 0: a shard is updated as a whole; DeepSpeed updates "
        "one "
        "parameter after another");
  }
  if (config.zero.overlaps() && config.pipeline.stages > 1) {
    say("overlap_comm: off, since stages reduce at the end of a batch");
  }
  if (!config.zero.contiguous_gradients && config.zero.stage > 0) {
    say("contiguous_gradients false: gradients go into buckets all the same");
  }
  if (config.zero.offload_optimizer.pin_memory ||
      config.zero.offload_param.pin_memory) {
    say("pin_memory: beside a GPU the host's memory is pinned with or without "
        "it");
  }
  return remarks;
}

}  // namespace internal
}  // namespace shardbook::engine
