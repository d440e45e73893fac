// Reading configs: every key, every refusal, batch arithmetic.

#include "chapters/15_engine/deepspeed_config.h"

#include <fstream>
#include <nlohmann/json.hpp>

#include "core/check.h"
#include "tests/chapters/15_engine/engine_support.h"
#include "tests/support/errors.h"
#include "tests/support/temp_folder.h"

namespace shardbook::engine {
namespace {

using nlohmann::json;

// The right half of the page's table of keys.
TEST(EngineConfig, AnEmptyFileHasTheDefaults) {
  EXPECT_EQ(json::parse(parse("{}").to_json()), json::parse(R"({
    "gradient_clipping": 1, "prescale_gradients": false,
    "gradient_predivide_factor": 1, "bf16": {"enabled": false},
    "fp16": {"enabled": false, "auto_cast": false, "loss_scale": 0,
      "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2,
      "consecutive_hysteresis": false, "min_loss_scale": 1,
      "fp16_master_weights_and_grads": false},
    "zero_optimization": {"stage": 0, "allgather_partitions": true,
      "allgather_bucket_size": 500000000, "reduce_scatter": true,
      "reduce_bucket_size": 500000000, "overlap_comm": false,
      "contiguous_gradients": true,
      "offload_optimizer": {"device": "none"},
      "offload_param": {"device": "none"},
      "stage3_prefetch_bucket_size": 50000000,
      "stage3_param_persistence_threshold": 100000,
      "stage3_max_live_parameters": 1000000000,
      "stage3_max_reuse_distance": 1000000000, "sub_group_size": 1000000000,
      "round_robin_gradients": false},
    "pipeline": {"stages": 1, "partition": "uniform",
      "activation_checkpoint_interval": 0},
    "shardbook": {"tensor_parallel": {"size": 1, "mode": "1d", "depth": 1,
        "sequence_parallel": false},
      "context_parallel": {"size": 1, "kind": "ring", "layout": "contiguous"},
      "schedule": "1f1b", "chunks": 2, "recompute": "never",
      "sharding": "zero"},
    "wall_clock_breakdown": false})"));
}

TEST(EngineConfig, DefaultsInsideSections) {
  for (const int stage : {1, 2, 3}) {
    EXPECT_EQ(config_of(stage, 1).overlaps(), stage == 3);
  }
  const SchedulerConfig warmup =
      parse(R"({"scheduler": {"type": "WarmupLR", "params": {}}})").scheduler;
  EXPECT_EQ(warmup.warmup_min_lr, 0);
  EXPECT_FALSE(warmup.warmup_max_lr.has_value());  // the optimizer's
  EXPECT_EQ(warmup.warmup_num_steps, 1000);
  EXPECT_EQ(warmup.warmup_type, "log");
  const SchedulerConfig decay =
      parse(R"({"scheduler": {"type": "WarmupDecayLR", "params":
                {"total_num_steps": 2000}}})")
          .scheduler;
  EXPECT_EQ(decay.warmup_max_lr, 0.001);
  EXPECT_EQ(decay.warmup_num_steps, 1000);
}

constexpr const char* kFull = R"({
  "_remark": "every key",
  "train_batch_size": 16, "train_micro_batch_size_per_gpu": 2,
  "gradient_accumulation_steps": 2, "steps_per_print": 10,
  "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.99],
    "eps": 1e-7, "weight_decay": 3e-7, "adam_w_mode": true}},
  "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 0.0001,
    "warmup_max_lr": 0.002, "warmup_num_steps": 5, "warmup_type": "linear",
    "total_num_steps": 50}},
  "gradient_clipping": 1.0, "prescale_gradients": false,
  "gradient_predivide_factor": 1.0,
  "fp16": {"enabled": true, "auto_cast": true, "loss_scale": 0,
    "initial_scale_power": 15, "loss_scale_window": 500, "hysteresis": 3,
    "consecutive_hysteresis": true, "min_loss_scale": 2,
    "fp16_master_weights_and_grads": true},
  "bf16": {"enabled": false},
  "zero_optimization": {"stage": 2, "allgather_partitions": false,
    "allgather_bucket_size": 5e7, "reduce_scatter": false,
    "reduce_bucket_size": 2e8, "overlap_comm": true,
    "contiguous_gradients": false,
    "offload_optimizer": {"device": "cpu"},
    "offload_param": {"device": "none"},
    "stage3_prefetch_bucket_size": 1000,
    "stage3_param_persistence_threshold": 10,
    "stage3_max_live_parameters": 1e8, "stage3_max_reuse_distance": 1e8,
    "sub_group_size": 1e8, "round_robin_gradients": true},
  "pipeline": {"stages": 1, "partition": "parameters",
    "activation_checkpoint_interval": 1},
  "shardbook": {"tensor_parallel": {"size": 4, "mode": "2.5d", "depth": 1},
    "context_parallel": {"size": 2, "kind": "ulysses"}, "schedule": "gpipe",
    "chunks": 3, "recompute": "never", "experts": {"num_experts": [4, 8], "ep_size": 2, "top_k": 2,
      "noisy_gate_policy": "Jitter", "drop_tokens": false, "use_rts": false,
      "min_capacity": 0, "aux_coefficient": 0.5}},
  "wall_clock_breakdown": true
})";

TEST(EngineConfig, EveryKeyIsReadAndWrittenAgain) {
  const DeepSpeedConfig config = parse(kFull);
  EXPECT_EQ(config.optimizer.params.beta1, 0.8);
  EXPECT_EQ(config.optimizer.name(), "adamw");
  EXPECT_EQ(config.loss_scale().scale, 32768);
  EXPECT_EQ(config.loss_scale().hysteresis, 3);
  EXPECT_EQ(config.zero.reduce_bucket_size, 200'000'000);
  EXPECT_EQ(config.book.moe.num_experts, (std::vector<int>{4, 8}));
  // The round trip
  const std::string text = config.to_json();
  EXPECT_EQ(parse(text).to_json(), text);
  expect_kept(kFull);
}

// Keys that the full text cannot have, since they exclude others.
TEST(EngineConfig, KeysThatExcludeOthersAreWrittenToo) {
  expect_kept(R"({"prescale_gradients": true, "communication_data_type":
      "fp16", "bf16": {"enabled": true}, "gradient_clipping": 0.25,
      "optimizer": {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9,
        "nesterov": true, "weight_decay": 0.125}},
      "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 7}}})");
  expect_kept(R"({"gradient_predivide_factor": 2.5, "fp16": {"enabled": true,
      "loss_scale": 128.0}, "optimizer": {"type": "SGD", "params":
      {"momentum": 0.5, "dampening": 0.25}}})");
  expect_kept(R"({"zero_optimization": {"stage": 3, "offload_optimizer":
      {"device": "cpu"}, "offload_param": {"device": "cpu"}}})");
  expect_kept(R"({"zero_allow_untested_optimizer": true, "gradient_clipping":
      0.0, "optimizer": {"type": "SGD"}, "zero_optimization": {"stage": 1,
      "compute_grad_norm": false}})");
  expect_kept(R"({"optimizer": {"type": "Adam", "params": {"torch_adam": true,
      "weight_decay": 0.5}}, "scheduler": {"type": "WarmupDecayLR", "params":
      {"warmup_max_lr": null, "total_num_steps": 3}}})");
}

TEST(EngineConfig, KeysOfFp16AreThoseOfTheScaler) {
  const LossScaleOptions usual =
      parse(R"({"fp16": {"enabled": true}})").loss_scale();
  EXPECT_EQ(usual.scale, 65536);  // older DeepSpeed: 2^32 and hysteresis 1
  EXPECT_EQ(usual.window, 1000);
  EXPECT_EQ(usual.hysteresis, 2);
  EXPECT_EQ(usual.min_scale, 1);
  EXPECT_FALSE(usual.consecutive_hysteresis);
  const LossScaleOptions given = parse(kFull).loss_scale();
  EXPECT_EQ(given.window, 500);
  EXPECT_EQ(given.min_scale, 2);
  EXPECT_TRUE(given.consecutive_hysteresis);
}

TEST(EngineConfig, TheDocumentsConfigsAreReadAndWrittenAgain) {
  for (const std::string name :
       {"getting_started", "gpt2", "moe", "pipeline"}) {
    const std::string file =
        SHARDBOOK_ROOT "/chapters/15_engine/configs/" + name + ".json";
    const DeepSpeedConfig config = DeepSpeedConfig::read(file);
    EXPECT_EQ(parse(config.to_json()).to_json(), config.to_json()) << name;
    std::ifstream text(file);
    json given = json::parse(text);
    // An old name, and one number for a list, are written in the usual form
    json& zero = given["zero_optimization"];
    if (zero.contains("cpu_offload")) {
      zero["offload_optimizer"]["device"] =
          zero["cpu_offload"] ? "cpu" : "none";
      zero.erase("cpu_offload");
    }
    if (name == "moe") {
      given["shardbook"]["experts"]["num_experts"] = json::array({8});
    }
    expect_kept(given.dump());
  }
}

// EngineKeys has every key with a letter left out.
TEST(EngineConfig, ParametersOfAnotherOptimizerAreNamedWithItsOwn) {
  expect_error(R"({"optimizer": {"type": "SGD", "params": {"betas": [0, 0]}}})",
               "/optimizer/params/betas: PyTorch's SGD, which DeepSpeed "
               "creates for SGD, has no such parameter; leave it out, or give "
               "lr, weight_decay, momentum");
}

// The tests of spelling have more, and those of published files.
TEST(EngineConfig, WrongValuesAreNamed) {
  expect_error("[]", "ds.json: /: a list is not allowed; give an object");
  expect_error(R"({"train_batch_size": 2.5})", "/train_batch_size: 2.5 is not");
  expect_error(R"({"zero_optimization": {"stage": 4}})",
               "/zero_optimization/stage: 4 is not allowed; give a whole "
               "number from 0 to 3");
  expect_error(R"({"zero_optimization": 2})",
               "/zero_optimization: 2 is not allowed; give an object");
  expect_error(R"({"fp16": {"enabled": 2}})", "give true or false");
  expect_error(R"({"optimizer": {"type": "sgd"}})",
               "\"sgd\" is unknown; give Adam, AdamW or SGD");
  expect_error(R"({"optimizer": {"params": {}}})", "/optimizer/type: missing");
  expect_error(R"({"scheduler": {"type": "WarmupDecayLR", "params": {}}})",
               "/scheduler/params/total_num_steps: missing");
  expect_error(R"({"communication_data_type": "int8"})",
               "give fp32, fp16 or bf16");
  expect_error(R"({"zero_optimization": {"offload_optimizer":
                   {"device": "nvme"}}})",
               "give none or cpu");
  expect_error(R"({"shardbook": {"experts": {}}})",
               "/shardbook/experts/num_experts: missing");
  // ep_size alone is for models with experts of their own
  expect_error(R"({"shardbook": {"experts": {"ep_size": 2, "top_k": 2}}})",
               "/shardbook/experts/num_experts: missing");
  const std::string alone = R"({"shardbook": {"experts": {"ep_size": 2}}})";
  EXPECT_EQ(DeepSpeedConfig::parse(alone, "ds.json").book.ep_size, 2);
}

TEST(EngineConfig, KeysThatExcludeEachOtherAreAllNamed) {
  expect_error(R"({"zero_optimization": {"offload_optimizer":
                   {"device": "cpu"}}})",
               "/zero_optimization/offload_optimizer with "
               "/zero_optimization/stage 0");
  expect_error(R"({"zero_optimization": {"stage": 2, "offload_param":
                   {"device": "cpu"}}})",
               "/zero_optimization/offload_param with /zero_optimization/stage "
               "2");
  expect_error(R"({"zero_optimization": {"stage": 2}, "pipeline": {"stages":
                   2}})",
               "/zero_optimization/stage 2 with /pipeline/stages 2: a stage "
               "sums gradients over all micro-batches");
  expect_error(R"({"zero_optimization": {"stage": 3}, "pipeline": {"stages":
                   2}})",
               "2m times");
  expect_error(R"({"zero_optimization": {"stage": 2},
                   "prescale_gradients": true})",
               "/prescale_gradients true with /zero_optimization/stage 2 and "
               "/zero_optimization/reduce_scatter true");
  expect_error(R"({"zero_optimization": {"stage": 2},
                   "gradient_predivide_factor": 2})",
               "/gradient_predivide_factor with /zero_optimization/stage 2 and "
               "/zero_optimization/reduce_scatter true");
  expect_error(R"({"zero_optimization": {"stage": 3, "reduce_scatter": false},
                   "gradient_predivide_factor": 2})",
               "/gradient_predivide_factor with /zero_optimization/stage 3: "
               "ZeRO divides");
  expect_error(
      R"({"optimizer": {"type": "Adam", "params":
                   {"max_grad_norm": 1}}})",
      "/optimizer/params/max_grad_norm: 1 is not offered: gradients are "
      "clipped by the "
      "engine, not by the optimizer; give /gradient_clipping");
  expect_error(R"({"fp16": {"fp16_master_weights_and_grads": true},
                   "zero_optimization": {"stage": 2}})",
               "/fp16/fp16_master_weights_and_grads with");
  expect_error(R"({"zero_optimization": {"stage": 2, "cpu_offload": true,
                   "offload_optimizer": {"device": "cpu"}}})",
               "/zero_optimization/cpu_offload: is the old name of "
               "/zero_optimization/offload_optimizer");
  expect_error(R"({"tensor_parallel": {"autotp_size": 2}, "shardbook":
                   {"tensor_parallel": {"size": 2}}})",
               "/tensor_parallel/autotp_size is in the file as well");
  expect_error(R"({"zero_optimization": {"stage": 3}, "shardbook":
                   {"experts": {"num_experts": 4}}})",
               "/shardbook/experts with /zero_optimization/stage 3");
  expect_error(R"({"shardbook": {"experts": {"num_experts": 4, "top_k": 2,
                   "noisy_gate_policy": "RSample"}}})",
               "/shardbook/experts/noisy_gate_policy \"RSample\" with "
               "/shardbook/experts/top_k 2: it samples the one choice");
  // Each of the three conditions for f16 masters alone
  for (const char* others :
       {R"("enabled": false}, "zero_optimization": {"stage": 2,
            "offload_optimizer": {"device": "cpu"}}})",
        R"("enabled": true}, "zero_optimization": {"stage": 3,
            "offload_optimizer": {"device": "cpu"}}})",
        R"("enabled": true}, "zero_optimization": {"stage": 2}})"}) {
    expect_error(R"({"fp16": {"fp16_master_weights_and_grads": true, )" +
                     std::string(others),
                 "/fp16/fp16_master_weights_and_grads with");
  }
}

TEST(EngineConfig, OldNamesOfOffload) {
  const DeepSpeedConfig config = parse(
      R"({"zero_optimization": {"stage": 3, "cpu_offload": true,
          "cpu_offload_param": true}})");
  EXPECT_TRUE(config.zero.offload_optimizer);
  EXPECT_TRUE(config.zero.offload_parameters);
  EXPECT_FALSE(parse(R"({"zero_optimization": {"cpu_offload": false}})")
                   .zero.offload_optimizer);
}

TEST(EngineConfig, AFileThatIsMissingIsNamed) {
  const TempFolder folder;
  shardbook::expect_error([&] { DeepSpeedConfig::read(folder / "none.json"); },
                          {"none.json: cannot be read"});
}

}  // namespace
}  // namespace shardbook::engine
