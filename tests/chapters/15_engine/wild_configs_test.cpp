// Files in the style of published ones: wild/KIND_*.json. Each runs and its
// keys without effect are named, or is refused with every reason named.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <sstream>

#include "tests/chapters/15_engine/wild_support.h"
#include "tests/support/errors.h"
#include "tests/support/sanitized.h"

namespace shardbook::engine {
namespace {

using Lines = std::vector<std::string>;

Lines sorted(Lines lines) {
  std::sort(lines.begin(), lines.end());
  return lines;
}

struct Wild {
  const char* name;
  /// Keys without effect, or each message's beginning, without "--config: ".
  Lines says;
  int ranks = 1;  ///< the smallest number that its sizes and degrees allow
};

const std::vector<Wild>& running() {
  static const std::string zero = "/zero_optimization/";
  static const std::string gathers =
      zero + "stage3_gather_16bit_weights_on_model_save";
  static const std::string untested = "/zero_allow_untested_optimizer";
  static const std::vector<Wild> all = {
      // Keys that the Hugging Face Trainer fills
      {"trainer_stage0", {}},
      {"trainer_stage1", {}},
      {"trainer_stage2", {}},
      {"trainer_stage2_offload", {zero + "offload_optimizer/pin_memory"}},
      {"trainer_stage3", {gathers}},
      {"trainer_stage3_offload",
       {gathers, zero + "offload_optimizer/pin_memory",
        zero + "offload_param/pin_memory"}},
      {"trainer_bf16", {}},
      {"trainer_fp16", {}},
      {"axolotl_zero1", {}},
      {"axolotl_zero3_offload_parameters",
       {"/zero_force_ds_cpu_optimizer", untested,
        zero + "offload_param/pin_memory",
        zero + "gather_16bit_weights_on_model_save"}},
      {"llama_factory_z0", {untested}},
      {"llama_factory_z2_tensor_parallel",
       {untested, zero + "gather_16bit_weights_on_model_save"},
       /*ranks=*/2},
      {"llama_factory_z3_long_sequences", {untested, gathers}, /*ranks=*/2},
      {"accelerate_stage1",
       {"/optimizer/params/torch_adam", "/optimizer/params/adam_w_mode"}},
      {"accelerate_stage2_offload",
       {"/optimizer/params/torch_adam", untested,
        zero + "offload_optimizer/nvme_path"}},
      {"fastchat_s2", {}},
      {"fastchat_s3", {gathers}},
      {"megatron_pipeline", {"/pipeline/seed_layers"}, /*ranks=*/2},
      {"examples_comments", {}},
      {"examples_hybrid_engine",
       {"/hybrid_engine", zero + "memory_efficient_linear"}},
      {"examples_pipeline", {}},
      {"examples_autotuning", {"/autotuning"}},
      {"examples_inference",
       {"/aio", zero + "offload_param/pin_memory",
        zero + "offload_param/buffer_count",
        zero + "offload_param/buffer_size"}},
      {"tests_stage3_zeros", {zero + "gather_16bit_weights_on_model_save"}},
      {"tests_activation_checkpointing",
       {"/disable_allgather", "/activation_checkpointing/profile",
        "/activation_checkpointing/synchronize_checkpoint_boundary"}},
      {"tests_monitors",
       {"/tensorboard", "/wandb", "/csv_monitor", "/comms_logger",
        "/flops_profiler", "/dump_state", "/memory_breakdown"}},
      {"tests_zero_plus_plus_off",
       {zero + "zero_hpz_partition_size", zero + "zero_quantized_weights",
        zero + "zero_quantized_gradients", zero + "ignore_unused_parameters"}},
      {"tests_checkpoint",
       {"/checkpoint", "/seq_parallel_communication_data_type",
        zero + "elastic_checkpoint", zero + "load_from_fp32_weights"}},
      {"tests_more_ranks", {}, /*ranks=*/4},
      {"tests_predivide", {}},
      {"precision_all_off", {"/torch_autocast"}},
      {"old_names_stage2", {zero + "cpu_offload_use_pin_memory"}},
      {"old_names_stage3", {zero + "stage3_gather_fp16_weights_on_model_save"}},
  };
  return all;
}

const std::vector<Wild>& refused() {
  static const std::vector<Wild> all = {
      {"megatron_old_optimizer", {"/optimizer/params/max_grad_norm: "}},
      {"megatron_bf16", {"/data_types/grad_accum_dtype \"fp32\" "}},
      {"megatron_curriculum", {"/curriculum_learning: "}},
      {"megatron_curriculum_off", {"/curriculum_learning: "}},
      {"megatron_random_layers", {"/data_efficiency: "}},
      {"megatron_template", {"not JSON from line 2, column 2"}},
      {"examples_no_bias_correction", {"/optimizer/params/bias_correction: "}},
      {"examples_one_bit_adam", {"/optimizer/type: \"OneBitAdam\" "}},
      {"examples_zero_one_adam", {"/optimizer/type: \"ZeroOneAdam\" "}},
      {"examples_lamb", {"/optimizer/type: \"Lamb\" "}},
      {"examples_layer_drop", {"/progressive_layer_drop: "}},
      {"examples_quantize", {"/quantize_training: "}},
      {"examples_compression", {"/compression_training: "}},
      {"examples_compression_off", {"/compression_training: "}},
      {"examples_nvme", {"/zero_optimization/offload_optimizer/device: "}},
      {"examples_zenflow", {"/zero_optimization/zenflow: "}},
      {"tests_zero_plus_plus",
       {"/zero_optimization/zero_quantized_weights: ",
        "/zero_optimization/zero_quantized_gradients: "}},
      {"tests_elasticity", {"/elasticity: "}},
      {"tests_sum_of_gradients", {"/gradient_allreduce_op: \"sum\" "}},
      {"tests_one_cycle", {"/scheduler/type: \"OneCycle\" "}},
      {"precision_both_enabled", {"/bf16/enabled and /fp16/enabled "}},
      {"precision_amp", {"/amp: "}},
      {"axolotl_zero2_compile", {"/compile/disable: ", "/compile/backend: "}},
      {"precision_autocast", {"/torch_autocast: "}},
      {"precision_bf16_masters",
       {"/bf16/bf16_master_weights_and_grads: ",
        "/bf16/bf16_optimizer_states: "}},
      {"typo_stage",
       {"/zero_optimization/stge: unknown key; did you mean \"stage\"?",
        "/zero_optimization/overlap_com: unknown key; did you mean "
        "\"overlap_comm\"?"}},
      {"typo_batch",
       {"/train_batch_sise: unknown key; did you mean \"train_batch_size\"?",
        "/gradient_acumulation_steps: unknown key; did you mean "
        "\"gradient_accumulation_steps\"?"}},
      {"typo_offload",
       {"/zero_optimization/offload_optimzer: unknown key; did you mean "
        "\"offload_optimizer\"?"}},
      {"typo_optimizer",
       {"/optimizer/params/learning_rate: unknown key; ",
        "/optimizer/params/weight_decai: unknown key; did you mean "
        "\"weight_decay\"?"}},
      {"typo_beside_known_keys",
       {"/zero_allow_untested_optimiser: unknown key; did you mean "
        "\"zero_allow_untested_optimizer\"?",
        "/activation_checkpointing/partition_activation: unknown key; did you "
        "mean \"partition_activations\"?",
        "/log: unknown key; "}},
  };
  return all;
}

/// Keys that a remark calls without effect.
Lines without_effect(const std::string& remarks) {
  Lines keys;
  std::istringstream lines(remarks);
  for (std::string line; std::getline(lines, line);) {
    const std::size_t end = line.find(": has no effect here");
    if (end != std::string::npos) keys.push_back(line.substr(0, end));
  }
  return keys;
}

TEST(EngineWildConfigs, TheTablesHaveEachFileOnce) {
  Lines listed, found;
  for (const Wild& wild : running()) listed.emplace_back(wild.name);
  for (const Wild& wild : refused()) listed.emplace_back(wild.name);
  for (const auto& entry : std::filesystem::directory_iterator(wild_folder())) {
    found.push_back(entry.path().stem().string());
  }
  EXPECT_EQ(sorted(listed), sorted(found));
}

TEST(EngineWildConfigs, KeysWithoutEffectAreNamedAndNoOthers) {
  for (const Wild& wild : running()) {
    SCOPED_TRACE(wild.name);
    const Outcome outcome = outcome_of(wild_text(wild.name), wild.ranks);
    EXPECT_EQ(outcome.error, "");
    EXPECT_EQ(sorted(without_effect(outcome.remarks)), sorted(wild.says));
  }
}

TEST(EngineWildConfigs, EachReasonIsNamedAndNoOthers) {
  for (const Wild& wild : refused()) {
    SCOPED_TRACE(wild.name);
    const std::string error = outcome_of(wild_text(wild.name)).error;
    EXPECT_EQ(std::count(error.begin(), error.end(), '\n') + 1,
              static_cast<std::ptrdiff_t>(wild.says.size()))
        << error;
    for (const std::string& reason : wild.says) {
      EXPECT_NE(error.find("--config: " + reason), std::string::npos)
          << error << "\nexpected: " << reason;
    }
  }
}

/// A step of the file's choice, as the chapter's program runs it.
void expect_a_step(const std::string& text, int world_size) {
  Options options = options_for(world_size);
  options.steps = 1;
  options.dtype = DType::kF32;
  expect_claims(train_config(options, read_config(text, options, {})));
}

TEST(EngineWildConfigs, WhatIsNotRefusedTrains) {
  for (const Wild& wild : running()) {
    for (const int world_size : sized<int>({1, 2, 4}, {2})) {
      if (world_size < wild.ranks || world_size > std::max(2, wild.ranks)) {
        continue;
      }
      SCOPED_TRACE(std::string(wild.name) + " on " +
                   std::to_string(world_size));
      expect_a_step(wild_text(wild.name), world_size);
    }
  }
}

// 32 samples = 2 x 4 steps x 4 ranks.
TEST(EngineWildConfigs, ABatchForMoreRanksIsAnErrorOnFewer) {
  const std::string error = shardbook::error_of(
      [&] { expect_a_step(wild_text("tests_more_ranks"), 2); });
  EXPECT_EQ(error,
            "train_batch_size 32 is not train_micro_batch_size_per_gpu 2 x "
            "gradient_accumulation_steps 4 x data-parallel ranks 2; give 16");
}

}  // namespace
}  // namespace shardbook::engine
