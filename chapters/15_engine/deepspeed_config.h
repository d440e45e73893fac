#pragma once

// One JSON file chooses how a model is trained. The keys are DeepSpeed's:
//
//   {"train_batch_size": 24,
//    "gradient_accumulation_steps": 2,
//    "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
//    "zero_optimization": {"stage": 2}}
//
//   DeepSpeedConfig config = DeepSpeedConfig::parse(text, "ds.json");
//   BatchSizes sizes = resolve_batch(config.batch, /*dp=*/4);
//   config.to_json();                        // every key, with its value
//
// Values and defaults are read as by DeepSpeed 0.19.8: "2" is a stage, "Adam" is
// AdamW unless adam_w_mode is false, and gradients are clipped at 1 unless a key
// says otherwise. Every key of DeepSpeed's is known (deepspeed_keys.cpp): it acts,
// or `remarks` reports that it has no effect here, or an error reports which
// numbers it would change. `remarks` also names each default that some version of
// DeepSpeed sets otherwise. A file that DeepSpeed refuses is an error here, too,
// and so is a key that it does not have.
//
// microsoft/DeepSpeed, deepspeed/runtime/{config,constants}.py,
// deepspeed/runtime/zero/config.py.

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "chapters/03_zero_fsdp/zero/zero_options.h"
#include "chapters/13_moe/moe_layer.h"
#include "chapters/14_hybrid_3d/degrees.h"
#include "chapters/common/run/loss_scaler.h"
#include "core/optim.h"

namespace shardbook::engine {

/// Samples of an optimizer step, of one forward on one rank, and forwards of a
/// step; 0: not given.
struct BatchSizes {
  std::int64_t train = 0;         ///< train_batch_size
  std::int64_t micro = 0;         ///< train_micro_batch_size_per_gpu
  std::int64_t accumulation = 0;  ///< gradient_accumulation_steps
};

/// train = micro x accumulation x dp: two of them give the third; with train or
/// micro only, accumulation is 1. `dp` counts data-parallel ranks, not the
/// world. Throws Error, with the numbers given, where the product does not hold
/// or no batch size is given. `train_key` is the key of `train`.
BatchSizes resolve_batch(const BatchSizes& given, std::int64_t dp,
                         const std::string& train_key = "train_batch_size");

/// weight_decay of PyTorch's AdamW where nobody gives it.
inline constexpr double kTorchWeightDecay = 0.01;

struct OptimizerConfig {
  std::string type;  ///< "Adam", "AdamW" or "SGD"; empty: no section
  OptimizerOptions params;
  bool torch_adam = false;  ///< PyTorch's class, with its weight decay
  /// "Adam": weight decay apart from the gradient, as AdamW. Files default to
  /// true.
  bool adam_w_mode = false;
  /// The name that make_optimizer knows.
  std::string name() const;
};

struct SchedulerConfig {
  std::string type;  ///< "WarmupLR" or "WarmupDecayLR"; empty: no section
  double warmup_min_lr = 0;
  /// None: the optimizer's rate. That is WarmupLR's default; WarmupDecayLR's is
  /// 0.001.
  std::optional<double> warmup_max_lr;
  std::int64_t warmup_num_steps = 1000;
  std::string warmup_type = "log";  ///< or "linear"
  std::int64_t total_num_steps = 0;
};

struct Fp16Config {
  bool enabled = false;
  bool auto_cast = false;  ///< cast inputs; false: they have to be f16
  double loss_scale = 0;   ///< 0: dynamic
  int initial_scale_power = 16;
  std::int64_t loss_scale_window = 1000;
  int hysteresis = 2;
  bool consecutive_hysteresis = false;
  std::int64_t min_loss_scale = 1;
  bool fp16_master_weights_and_grads = false;

  bool is_dynamic() const { return loss_scale == 0; }
};

/// DeepSpeed's defaults of section "zero_optimization".
inline zero::ZeroOptions default_zero() {
  zero::ZeroOptions options;
  options.stage = 0;
  options.max_reuse_distance = 1'000'000'000;
  return options;
}

/// Section "shardbook": choices that DeepSpeed makes in code, or lacks.
struct BookConfig {
  std::string tensor_parallel_mode = "1d";  ///< "2d", "2.5d", "3d"
  int tensor_parallel_depth = 1;            ///< of 2.5d
  /// Recomputed in each block: "never", "attention", "blocks". Whole stages are
  /// the pipeline's activation_checkpoint_interval.
  std::string recompute = "never";
  std::string sharding = "zero";  ///< stage 3: "zero", "fsdp" or "fsdp2"
  /// Its experts, except for noise in the gate; none without num_experts.
  moe::MoeOptions moe;
  std::string noisy_gate_policy = "None";  ///< or "Jitter", "RSample"
  /// 0: as many as possible; 1 for a model that has its own experts.
  int ep_size = 0;
  bool use_data_before_expert_parallelism = false;

  bool has_experts() const { return !moe.num_experts.empty(); }
};

struct DeepSpeedConfig {
  std::string label;  ///< the file, for messages
  BatchSizes batch;
  std::int64_t steps_per_print = 0;  ///< 0: never
  OptimizerConfig optimizer;
  /// ZeRO with SGD, which DeepSpeed refuses otherwise.
  bool allows_untested_optimizer = false;
  SchedulerConfig scheduler;
  double gradient_clipping = 1;  ///< 0: off
  bool prescale_gradients = false;
  double gradient_predivide_factor = 1;
  /// Dtype of gradients on the wire: "fp32", "fp16", "bf16"; empty: theirs.
  std::string communication_data_type;
  /// Dtype of their sum over ranks that share a sample; empty: theirs.
  std::string seq_parallel_communication_data_type;
  /// Dtype of sums over micro-batches; empty: the gradients'.
  std::string grad_accum_dtype;
  bool bf16 = false;
  Fp16Config fp16;
  /// Section zero_optimization, as options of chapter 03. Other keys' part in
  /// them is not included.
  zero::ZeroOptions zero = default_zero();
  std::optional<bool> overlap_comm;  ///< not given: stage 3 only
  bool contiguous_gradients = true;
  bool computes_grad_norm = true;
  /// Degrees of parallelism, and the kinds and schedules that go with them, as
  /// options of chapter 14. The other options are not the config's.
  hybrid::HybridOptions degrees;
  /// Of a pipeline; above 0: recompute whole stages.
  std::int64_t activation_checkpoint_interval = 0;
  /// The section asks for recomputation: of blocks, where layers have them.
  bool activation_checkpointing = false;
  BookConfig book;
  bool wall_clock_breakdown = false;
  /// Options whose values took the place of "auto".
  std::set<std::string> filled_from;
  /// Paths of the file whose values act.
  std::vector<std::string> acts;
  /// Values filled in for "auto", keys of the file without effect, and relevant
  /// differences between versions of DeepSpeed.
  std::vector<std::string> remarks;

  /// Reads the text of a config: JSON, with Hjson's comments and a comma before a
  /// closing bracket. Throws Error with a line for each mistake, which names the
  /// file, the key by its path, its value and what is allowed; an unknown key with
  /// the nearest known one. Keys that begin with '_' are remarks.
  static DeepSpeedConfig parse(const std::string& text,
                               const std::string& label);
  /// The same for a file, or for a text that begins with '{'.
  static DeepSpeedConfig read(const std::string& file);
  /// Every key with its value. Parsing it again gives this config.
  std::string to_json() const;
  /// The same, after `acts` and `remarks` as keys that begin with '_'.
  std::string explained() const;

  /// The scales of f16, whose sequence depends on the stage of ZeRO; a static one
  /// never changes.
  LossScaleOptions loss_scale() const;
  /// "never", "attention", "blocks": the book's key, or what
  /// activation_checkpointing asks for.
  std::string recompute() const;
  /// bf16 or f16 where a section enables it, else `otherwise`.
  DType dtype(DType otherwise) const;
  /// Dtype of gradients on the wire; none: their own.
  std::optional<DType> wire() const;
  /// Whether gradients are divided by all ranks before they are summed.
  bool divides_first() const;
  /// Whether gradients travel during backward.
  bool overlaps() const { return overlap_comm.value_or(zero.stage == 3); }
};

/// The dtype of DeepSpeed's name: fp32, fp16, bf16.
DType dtype_of(const std::string& name);
/// Whether grad_accum_dtype asks for sums of g micro-batches that are wider than
/// the dtype of training. Throws Error for narrower ones, and for wider ones
/// without ZeRO, which DeepSpeed refuses.
bool sums_in_f32(const DeepSpeedConfig& config, DType dtype, std::int64_t g);

/// A value for "auto": its JSON, and where it comes from. Empty JSON removes
/// the key; its value then follows from the other keys.
struct AutoValue {
  std::string json, source;
};

/// By path.
using AutoValues = std::map<std::string, AutoValue>;

/// The text of a config without these values "auto", and a remark on each.
struct FilledConfig {
  std::string text;
  std::vector<std::string> remarks;
};

/// Replaces values "auto" in the text of a config: `values` are by path, such as
/// {"/optimizer/params/lr", {"0.001", "--lr"}}. For front ends, which know the
/// user's objects or options. An "auto" without a value stays; `parse` takes
/// DeepSpeed's default where DeepSpeed does, else it is an error. A path that
/// is not "auto" stays as it is. Throws Error for a text that is no JSON.
FilledConfig fill_auto(const std::string& text, const std::string& label,
                       const AutoValues& values);

}  // namespace shardbook::engine
