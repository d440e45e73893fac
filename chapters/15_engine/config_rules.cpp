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

LossScaleOptions DeepSpeedConfig::loss_scale() const {
  LossScaleOptions options;
  if (!fp16.is_dynamic()) {
    // Equal limits fix the scale; Megatron's raises no error at the lower one
    options.scale = options.min_scale = fp16.loss_scale;
    options.window = std::int64_t{1} << 60;
    options.kind = ScalerKind::kMegatron;
    return options;
  }
  options.scale = std::ldexp(1.0, fp16.initial_scale_power);
  options.window = fp16.loss_scale_window;
  options.hysteresis = fp16.hysteresis;
  options.min_scale = static_cast<double>(fp16.min_loss_scale);
  options.consecutive_hysteresis = fp16.consecutive_hysteresis;
  options.kind = zero.stage == 0 ? ScalerKind::kDeepSpeedStage0
                                 : ScalerKind::kDeepSpeed0171;
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
  const bool may = degrees.pp == 1 && !book.has_experts() &&
                   book.tensor_parallel_mode == "1d" &&
                   activation_checkpoint_interval == 0;
  return activation_checkpointing && may && book.recompute == "never"
             ? "blocks"
             : book.recompute;
}

bool sums_in_f32(const DeepSpeedConfig& config, DType dtype, std::int64_t g) {
  const std::string& name = config.grad_accum_dtype;
  if (name.empty() || dtype_of(name) == dtype) return false;
  const bool is_f64 = dtype == DType::kF64;  // the book's own
  if (is_f64 && g == 1) return false;
  SB_CHECK(
      dtype_of(name) == DType::kF32 && !is_f64, config.label,
      ": /data_types/grad_accum_dtype \"", name, "\" in ", dtype_name(dtype),
      ": sums would have fewer digits than what is summed; leave the key out");
  SB_CHECK(config.zero.stage > 0, config.label,
           ": /data_types/grad_accum_dtype \"", name, "\" in ",
           dtype_name(dtype),
           " with /zero_optimization/stage 0: DeepSpeed refuses it without "
           "ZeRO; give stage 1, or leave the key out");
  return g > 1;
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
  const zero::ZeroOptions& zero = config.zero;
  const std::string stage =
      "/zero_optimization/stage " + std::to_string(zero.stage);
  rules.check(!zero.offload_optimizer || zero.stage >= 2,
              "/zero_optimization/offload_optimizer with ", stage,
              zero.stage == 0 ? ": no optimizer is sharded"
                              : ": whole gradients stay on the device, so "
                                "nothing streams to the host",
              "; give stage 2 or 3");
  rules.check(!zero.offload_parameters || zero.stage == 3,
              "/zero_optimization/offload_param with ", stage,
              ": only stage 3 shards parameters; give stage 3");
  const bool has_cpu_adam = zero.offload_optimizer &&
                            config.optimizer.type != "SGD" &&
                            !config.optimizer.torch_adam;
  rules.check(
      !config.fp16.fp16_master_weights_and_grads ||
          (config.fp16.enabled && zero.stage == 2 && has_cpu_adam),
      "/fp16/fp16_master_weights_and_grads with ", stage,
      ": only ZeRO-2 whose Adam is on the host keeps f16 masters; give "
      "/fp16/enabled true, stage 2, /zero_optimization/offload_optimizer "
      "{\"device\": \"cpu\"}, and no /optimizer/params/torch_adam");
}

/// What DeepSpeed's ZeRO refuses.
void check_zero(const DeepSpeedConfig& config, Rules& rules) {
  const zero::ZeroOptions& zero = config.zero;
  const std::string stage =
      "/zero_optimization/stage " + std::to_string(zero.stage);
  const bool is_1_or_2 = zero.stage == 1 || zero.stage == 2;
  rules.check(!is_1_or_2 || zero.allgather_bucket_size % 2 == 0,
              "/zero_optimization/allgather_bucket_size ",
              zero.allgather_bucket_size, " with ", stage,
              ": DeepSpeed refuses odd sizes there; give an even one");
  rules.check(config.optimizer.type != "SGD" || zero.stage == 0 ||
                  config.allows_untested_optimizer,
              "/optimizer/type \"SGD\" with ", stage,
              ": DeepSpeed has not tested its ZeRO with SGD, and refuses it "
              "unless asked; give /zero_allow_untested_optimizer true");
  const bool may_leave_norm_out =
      is_1_or_2 && config.gradient_clipping == 0 && !zero.offload_optimizer &&
      !(zero.stage == 1 && config.bf16 && config.grad_accum_dtype == "fp32");
  rules.check(config.computes_grad_norm || may_leave_norm_out,
              "/zero_optimization/compute_grad_norm false with ", stage,
              " and /gradient_clipping ", config.gradient_clipping,
              ": DeepSpeed offers it with stages 1 and 2, /gradient_clipping "
              "0, no offload, and no sums in fp32 of stage 1; leave it out");
}

/// Sums of gradients in another dtype than that of training.
void check_accumulation(const DeepSpeedConfig& config, Rules& rules) {
  const DType dtype = config.dtype(DType::kF32);
  const std::string& name = config.grad_accum_dtype;
  rules.check(name.empty() || config.zero.stage > 0 || dtype_of(name) == dtype,
              "/data_types/grad_accum_dtype \"", name,
              "\" with /zero_optimization/stage 0: without ZeRO DeepSpeed sums "
              "in the dtype of training, here ",
              dtype_name(dtype), "; give stage 1, or leave the key out");
}

/// Limits of a loss scale that moves.
void check_loss_scale(const Fp16Config& fp16, Rules& rules) {
  const bool moves = fp16.enabled && fp16.is_dynamic();
  rules.check(!moves || fp16.loss_scale_window > 0, "/fp16/loss_scale_window ",
              fp16.loss_scale_window,
              " with a dynamic loss scale; give 1 or more");
  rules.check(!moves || fp16.min_loss_scale > 0, "/fp16/min_loss_scale ",
              fp16.min_loss_scale,
              " with a dynamic loss scale; give 1 or more");
}

/// How gradients are divided, and what is sent.
void check_reduction(const DeepSpeedConfig& config, Rules& rules) {
  const zero::ZeroOptions& zero = config.zero;
  const bool is_default =
      !config.prescale_gradients && config.gradient_predivide_factor == 1;
  const char* const key = config.prescale_gradients
                              ? "/prescale_gradients true"
                              : "/gradient_predivide_factor";
  // Stage 1 never looks at them while it scatters
  const bool sums_all =
      zero.stage < 2 || (zero.stage == 2 && !zero.reduce_scatter);
  rules.check(
      is_default || sums_all, key, " with /zero_optimization/stage ",
      zero.stage,
      zero.stage < 3 ? " and /zero_optimization/reduce_scatter true" : "",
      ": ZeRO divides by its ranks before it reduces; leave it out");
}

void check_pipeline(const DeepSpeedConfig& config, Rules& rules) {
  const int stage = config.zero.stage;
  rules.check(
      stage <= 1 || config.degrees.pp == 1, "/zero_optimization/stage ", stage,
      " with /pipeline/stages ", config.degrees.pp,
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
  rules.check(
      book.recompute == "never" || config.activation_checkpoint_interval == 0,
      "/shardbook/recompute \"", book.recompute,
      "\" with /pipeline/activation_checkpoint_interval ",
      config.activation_checkpoint_interval,
      ", which runs whole stages again; keep one of them");
  rules.check(config.zero.stage < 3 || !book.has_experts(),
              "/shardbook/experts with /zero_optimization/stage 3: experts are "
              "not whole on any rank, and stage 3 would gather them for every "
              "micro-batch; give stage 1 or 2");
  rules.check(book.noisy_gate_policy != "RSample" || book.moe.gate.k == 1,
              "/shardbook/experts/noisy_gate_policy \"RSample\" with "
              "/shardbook/experts/top_k ",
              book.moe.gate.k,
              ": it samples the one choice of a top-1 gate; give top_k 1, or "
              "\"Jitter\"");
}

}  // namespace

std::vector<std::string> broken_rules(const DeepSpeedConfig& config) {
  Rules rules = {config.label};
  rules.check(!config.bf16 || !config.fp16.enabled,
              "/bf16/enabled and /fp16/enabled are both true; keep one");
  check_offload(config, rules);
  check_zero(config, rules);
  check_accumulation(config, rules);
  check_loss_scale(config.fp16, rules);
  check_reduction(config, rules);
  check_pipeline(config, rules);
  check_book(config, rules);
  return rules.broken;
}

}  // namespace internal
}  // namespace shardbook::engine
