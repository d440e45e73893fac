// What a config does otherwise than a reader might think.

#include "chapters/15_engine/internal/config_rules.h"

namespace shardbook::engine::internal {

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
      !config.book.has_experts()) {
    say("/use_data_before_expert_parallelism: has no effect here: there are no "
        "experts");
  }
  if (config.scheduler.type == "WarmupLR" && !config.scheduler.warmup_max_lr) {
    say("warmup_max_lr is not given: the optimizer's lr; DeepSpeed before "
        "0.17.2 takes 0.001");
  }
  if (config.fp16.enabled && config.fp16.is_dynamic()) {
    const std::int64_t window = config.fp16.loss_scale_window;
    say("fp16: the loss scale begins at 2^" +
        std::to_string(config.fp16.initial_scale_power) +
        " and doubles after " + std::to_string(window + 1) +
        " good steps, then after " + std::to_string(window) +
        " each; DeepSpeed before 0.17.1 doubles it one step earlier, and older "
        "versions begin at 2^32 where the section has no such key");
  }
  if (config.fp16.enabled && config.fp16.is_dynamic() &&
      config.zero.stage == 0) {
    say("fp16 without ZeRO: each overflow halves the loss scale, whatever "
        "hysteresis says, as in DeepSpeed");
  }
  const zero::ZeroOptions& zero = config.zero;
  const bool is_1_or_2 = zero.stage == 1 || zero.stage == 2;
  if (config.prescale_gradients && config.gradient_predivide_factor != 1) {
    say("/gradient_predivide_factor: has no effect here: /prescale_gradients "
        "divides by all ranks before the sum");
  }
  if (zero.stage == 1 && zero.reduce_scatter) {
    const char* const why =
        ": has no effect here: stage 1 divides by its ranks before it reduces";
    if (config.prescale_gradients) {
      say(std::string("/prescale_gradients") + why);
    } else if (config.gradient_predivide_factor != 1) {
      say(std::string("/gradient_predivide_factor") + why);
    }
  }
  if (!zero.allgather_partitions && !is_1_or_2) {
    say("/zero_optimization/allgather_partitions: has no effect here: no "
        "updated parameters are gathered after a step");
  }
  if (config.allows_untested_optimizer &&
      (config.optimizer.type != "SGD" || zero.stage == 0)) {
    say("/zero_allow_untested_optimizer: has no effect here: this optimizer "
        "needs no such permission");
  }
  if (config.zero.sub_group_size == 0) {
    say("sub_group_size 0: a shard is updated as a whole; DeepSpeed updates "
        "one parameter after another");
  }
  if (config.overlaps() && config.pipeline.stages > 1) {
    say("overlap_comm: off, since stages reduce at the end of a batch");
  }
  if (!config.contiguous_gradients && config.zero.stage > 0) {
    say("contiguous_gradients false: gradients go into buckets all the same");
  }
  return remarks;
}

}  // namespace shardbook::engine::internal
