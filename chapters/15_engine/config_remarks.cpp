// What a config does otherwise than a reader might think.

#include "chapters/15_engine/internal/config_rules.h"

namespace shardbook::engine::internal {

std::vector<std::string> remarks_of(const DeepSpeedConfig& config,
                                    bool has_clipping) {
  std::vector<std::string> remarks;
  const auto say = [&](bool holds, const std::string& text) {
    if (holds) remarks.push_back(text);
  };
  const bool is_adam = config.optimizer.type == "Adam";
  say(is_adam && config.optimizer.adam_w_mode,
      "Adam: this run uses AdamW, as DeepSpeed does unless adam_w_mode is "
      "false");
  say(is_adam && !config.optimizer.adam_w_mode,
      "Adam with adam_w_mode false: this run adds weight decay to the "
      "gradient");
  say(!has_clipping, kClippingRemark);
  const std::string recompute = config.recompute();
  say(config.activation_checkpointing && recompute != "never",
      "activation_checkpointing: " + recompute +
          ", where the model has them, run forward again in backward, from "
          "inputs that stay where they are");
  say(config.activation_checkpointing && recompute == "never",
      "/activation_checkpointing: has no effect here: pipelines have "
      "activation_checkpoint_interval, experts and 2D to 3D layers keep all "
      "activations");
  const bool shares_samples = config.degrees.cp > 1;
  say(!config.seq_parallel_communication_data_type.empty() && !shares_samples,
      "/seq_parallel_communication_data_type: has no effect here: no ranks "
      "share a sample");
  say(shares_samples && config.dtype(DType::kF32) != DType::kF32,
      "gradients are summed over the ranks that share a sample in the dtype of "
      "training; DeepSpeed sums them in fp32 unless "
      "seq_parallel_communication_data_type says otherwise");
  say(config.book.use_data_before_expert_parallelism &&
          !config.book.has_experts(),
      "/use_data_before_expert_parallelism: has no effect here: there are no "
      "experts");
  say(config.scheduler.type == "WarmupLR" && !config.scheduler.warmup_max_lr,
      "warmup_max_lr is not given: the optimizer's lr; DeepSpeed before 0.17.2 "
      "takes 0.001");
  const bool scales = config.fp16.enabled && config.fp16.is_dynamic();
  const std::int64_t window = config.fp16.loss_scale_window;
  say(scales,
      "fp16: the loss scale begins at 2^" +
          std::to_string(config.fp16.initial_scale_power) +
          " and doubles after " + std::to_string(window + 1) +
          " good steps, then after " + std::to_string(window) +
          " each; DeepSpeed before 0.17.1 doubles it one step earlier, and "
          "older versions begin at 2^32 where the section has no such key");
  const zero::ZeroOptions& zero = config.zero;
  say(scales && zero.stage == 0,
      "fp16 without ZeRO: each overflow halves the loss scale, whatever "
      "hysteresis says, as in DeepSpeed");
  const bool predivides = config.gradient_predivide_factor != 1;
  say(config.prescale_gradients && predivides,
      "/gradient_predivide_factor: has no effect here: /prescale_gradients "
      "divides by all ranks before the sum");
  const std::string idle_key = config.prescale_gradients
                                   ? "/prescale_gradients"
                                   : "/gradient_predivide_factor";
  say(zero.stage == 1 && zero.reduce_scatter &&
          (config.prescale_gradients || predivides),
      idle_key +
          ": has no effect here: stage 1 divides by its ranks before it "
          "reduces");
  const bool is_1_or_2 = zero.stage == 1 || zero.stage == 2;
  say(!zero.allgather_partitions && !is_1_or_2,
      "/zero_optimization/allgather_partitions: has no effect here: no updated "
      "parameters are gathered after a step");
  say(config.allows_untested_optimizer &&
          (config.optimizer.type != "SGD" || zero.stage == 0),
      "/zero_allow_untested_optimizer: has no effect here: this optimizer "
      "needs no such permission");
  say(zero.sub_group_size == 0,
      "sub_group_size 0: a shard is updated as a whole; DeepSpeed updates one "
      "parameter after another");
  say(config.overlaps() && config.degrees.pp > 1,
      "overlap_comm: off, since stages reduce at the end of a batch");
  say(!config.contiguous_gradients && zero.stage > 0,
      "contiguous_gradients false: gradients go into buckets all the same");
  return remarks;
}

}  // namespace shardbook::engine::internal
