// The errors of prepare, and the config that it creates.

#include "chapters/common/models/models.h"
#include "core/layers.h"
#include "tests/chapters/15_engine/accelerator_support.h"
#include "tests/chapters/15_engine/config_support.h"
#include "tests/support/errors.h"

namespace shardbook::accelerate {
namespace {

struct Refused {
  std::string name;
  std::function<void(Script&)> change;
  /// Words in the message: fields, keys, values.
  std::vector<std::string> words;
  int ranks = 2;
};

std::function<void(Script&)> with(const Plugin& plugin) {
  return [plugin](Script& script) { script.options.plugin = plugin; };
}

std::function<void(Script&)> with_config(const std::string& text) {
  return with(DeepSpeedPlugin{.hf_ds_config = text});
}

std::vector<Refused> refused() {
  return {
      {"Precision",
       [](Script& s) { s.options.mixed_precision = "fp8"; },
       {"mixed_precision", "fp8", "bf16"}},
      {"Accumulation",
       [](Script& s) { s.options.gradient_accumulation_steps = 0; },
       {"gradient_accumulation_steps", "0"}},
      {"NoSamples", [](Script& s) { s.batch_size = 0; }, {"batch_size", "0"}},
      {"SplitBatches",
       [](Script& s) {
         s.options.split_batches = true;
         s.batch_size = 3;
       },
       {"split_batches", "3", "2 processes", "give 4"}},
      {"UnevenBatches",
       [](Script& s) {
         s.options.even_batches = false;
         s.samples = 5;
       },
       {"even_batches", "5 samples"}},
      {"NoOptimizer",
       [](Script& s) { s.optimizer.type = ""; },
       {"optimizer", "type"}},
      {"ShardingStrategy",
       with(Fsdp{.sharding_strategy = "FULL"}),
       {"sharding_strategy", "FULL", "HYBRID_SHARD"}},
      {"FsdpVersion",
       with(Fsdp{.fsdp_version = 3}),
       {"fsdp_version 3", "give 1 or 2"}},
      {"ShardSize",
       with(Fsdp{.shard_size = 2}),
       {"shard_size 2", "FULL_SHARD"}},
      {"HybridWithoutSize",
       with(Fsdp{.sharding_strategy = "HYBRID_SHARD"}),
       {"shard_size", "HYBRID_SHARD"}},
      {"WrapPolicy",
       with(Fsdp{.auto_wrap_policy = "LAYERS"}),
       {"auto_wrap_policy", "LAYERS", "NO_WRAP"}},
      {"Prefetch",
       with(Fsdp{.backward_prefetch = "EARLY"}),
       {"backward_prefetch", "EARLY", "BACKWARD_PRE"}},
      {"StateDictType",
       with(Fsdp{.state_dict_type = "FULL_STATE_DICT"}),
       {"state_dict_type", "FULL_STATE_DICT", "SHARDED_STATE_DICT"}},
      {"InitFlag",
       with(DeepSpeed{.zero_stage = 3, .zero3_init_flag = true}),
       {"zero3_init_flag", "host"}},
      {"Nvme",
       with(DeepSpeed{.offload_param_device = "nvme"}),
       {"offload_param_device", "nvme", "cpu"}},
      {"OffloadOfStageZero",
       with(DeepSpeed{.zero_stage = 0, .offload_optimizer_device = "cpu"}),
       {"/zero_optimization/offload_optimizer", "/zero_optimization/stage 0"}},
      {"TwoStages",
       with(
           DeepSpeed{.zero_stage = 2,
                     .hf_ds_config = R"({"zero_optimization": {"stage": 3}})"}),
       {"/zero_optimization/stage 3", "zero_stage", "2"}},
      {"TwoMicroBatches",
       with_config(R"({"train_micro_batch_size_per_gpu": 7})"),
       {"/train_micro_batch_size_per_gpu 7", "loader", "1"}},
      {"TwoAccumulations",
       with_config(R"({"gradient_accumulation_steps": 4})"),
       {"/gradient_accumulation_steps 4", "Accelerator", "1"}},
      {"TwoOptimizers",
       with_config(R"({"optimizer": {"type": "SGD"}})"),
       {"/optimizer/type SGD", "AdamW"}},
      {"TwoSchedulers",
       [](Script& s) {
         with_config(R"({"scheduler": {"type": "WarmupLR", "params": {}}})")(s);
         s.rate = [](std::int64_t) { return 0.1; };
       },
       {"/scheduler/type WarmupLR", "scheduler"}},
      {"Fp16AgainstTheConfig",
       [](Script& s) {
         with_config(R"({"fp16": {"enabled": false}})")(s);
         s.options.mixed_precision = "fp16";
       },
       {"/fp16/enabled", "mixed_precision fp16"}},
      {"UnknownKey",
       with_config(R"({"zero_optimisation": {}})"),
       {"zero_optimisation", "zero_optimization"}},
      {"AutoThatNobodyFills",
       with_config(R"({"scheduler": {"type": "WarmupLR",
                       "params": {"warmup_num_steps": "auto"}}})"),
       {"/scheduler/params/warmup_num_steps", "auto"}},
      {"NoObject",
       with_config(R"({"zero_optimization": 3})"),
       {"/zero_optimization"}},
      {"NoFile",
       with(DeepSpeed{.hf_ds_config = "/nowhere/ds.json"}),
       {"hf_ds_config", "/nowhere/ds.json"}},
      {"TpDegree", with(Megatron{.tp_degree = 3}), {"tp_degree 3", "2 ranks"}},
      {"PpDegree", with(Megatron{.pp_degree = 0}), {"pp_degree 0"}},
      {"MicroBatches",
       with(Megatron{.num_micro_batches = 2}),
       {"num_micro_batches 2"}},
      {"SequenceParallelism",
       with(Megatron{.sequence_parallelism = true}),
       {"sequence_parallelism", "tp_degree"}},
      {"Heads", with(Megatron{.tp_degree = 4}), {"tp_degree 4", "2 heads"}, 4},
  };
}

class AcceleratorErrors : public testing::TestWithParam<Refused> {};

TEST_P(AcceleratorErrors, NameTheFieldsAndKeys) {
  const Refused& param = GetParam();
  Script script;
  script.max_norm = 0;
  param.change(script);
  expect_text(error_of(script, param.ranks), param.words);
}

INSTANTIATE_TEST_SUITE_P(All, AcceleratorErrors, testing::ValuesIn(refused()),
                         [](const auto& info) { return info.param.name; });

TEST(AcceleratorErrors, ClippingOtherTensorsIsRefused) {
  Script script;
  script.clip = [](Accelerator& acc, PreparedModel& model) {
    Tensors some = model.parameters();
    some.pop_back();
    acc.clip_grad_norm_(some, 1);
  };
  expect_text(error_of(script), {"clip_grad_norm_", "model.parameters()"});
}

TEST(AcceleratorErrors, MegatronHasNoForwardAndNoModelToUnwrap) {
  Script script;
  script.options.plugin = Megatron{};
  for (const bool unwraps : {true, false}) {
    script.clip = [=](Accelerator& acc, PreparedModel& model) {
      if (unwraps) {
        acc.unwrap_model(model);
      } else {
        model(Tensor::zeros({1, 8}, {DType::kI64, Device()}));
      }
    };
    expect_text(error_of(script),
                {unwraps ? "get_state_dict" : "model.loss(batch)"});
  }
}

// --- The config that prepare makes -------------------------------------------

KnownValues known() {
  return {
      .micro_batch_size = 3,
      .accumulation = 2,
      .data_parallel_ranks = 4,
      .mixed_precision = "bf16",
      .optimizer = {.type = "", .params = {.lr = 0.02, .weight_decay = 0.1}},
      .warmup_num_steps = 5,
      .total_num_steps = 50,
      .hidden_size = 20};
}

TEST(AcceleratorConfig, AutoTakesTheScriptsValues) {
  DeepSpeedPlugin plugin;
  plugin.hf_ds_config = R"({
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto",
      "weight_decay": "auto", "betas": "auto", "eps": "auto"}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto",
      "warmup_max_lr": "auto", "warmup_num_steps": "auto",
      "total_num_steps": "auto"}},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto",
      "stage3_prefetch_bucket_size": "auto",
      "stage3_param_persistence_threshold": "auto",
      "offload_optimizer": {"device": "auto"}}})";
  const engine::DeepSpeedConfig config = deepspeed_config(plugin, known());
  engine::expect_values(config, R"({
    "train_batch_size": 24, "train_micro_batch_size_per_gpu": 3,
    "gradient_accumulation_steps": 2, "gradient_clipping": 1,
    "bf16": {"enabled": true}, "fp16": {"enabled": false},
    "optimizer": {"params": {"lr": 0.02, "weight_decay": 0.1}},
    "scheduler": {"params": {"warmup_min_lr": 0, "warmup_max_lr": 0.02,
      "warmup_num_steps": 5, "total_num_steps": 50}},
    "zero_optimization": {"reduce_bucket_size": 400,
      "stage3_prefetch_bucket_size": 360,
      "stage3_param_persistence_threshold": 200,
      "offload_optimizer": {"device": "none"}}})");
}

TEST(AcceleratorConfig, FieldsOfThePluginBecomeKeys) {
  const engine::DeepSpeedConfig config =
      deepspeed_config(DeepSpeed{.zero_stage = 3,
                                 .gradient_clipping = 0.5,
                                 .offload_optimizer_device = "cpu",
                                 .offload_param_device = "cpu"},
                       known());
  engine::expect_values(config, R"({"gradient_clipping": 0.5,
      "bf16": {"enabled": true}, "zero_optimization": {"stage": 3,
      "offload_optimizer": {"device": "cpu"},
      "offload_param": {"device": "cpu"}}})");
  // Without fields and config: stage 2, and DeepSpeed's clipping
  const engine::DeepSpeedConfig usual = deepspeed_config({}, known());
  EXPECT_EQ(usual.zero.stage, 2);
  EXPECT_EQ(usual.gradient_clipping, 1);
}

TEST(AcceleratorFields, OfFsdpAreItsOptions) {
  const auto options_of = [](const Fsdp& plugin) {
    return fsdp_options(plugin, "no", 4);
  };
  const fsdp::FsdpOptions usual = options_of({});
  EXPECT_EQ(usual.sharding_strategy, fsdp::ShardingStrategy::kFullShard);
  EXPECT_EQ(usual.backward_prefetch, fsdp::BackwardPrefetch::kPre);
  EXPECT_FALSE(usual.cpu_offload.offload_params);
  EXPECT_FALSE(usual.use_orig_params);
  EXPECT_TRUE(usual.sync_module_states);
  const fsdp::FsdpOptions other =
      options_of({.sharding_strategy = "NO_SHARD",
                  .auto_wrap_policy = "NO_WRAP",
                  .cpu_offload = true,
                  .backward_prefetch = "NO_PREFETCH",
                  .use_orig_params = true,
                  .sync_module_states = false});
  EXPECT_EQ(other.sharding_strategy, fsdp::ShardingStrategy::kNoShard);
  EXPECT_EQ(other.backward_prefetch, fsdp::BackwardPrefetch::kNone);
  EXPECT_TRUE(other.cpu_offload.offload_params);
  EXPECT_TRUE(other.use_orig_params);
  EXPECT_FALSE(other.sync_module_states);
  EXPECT_FALSE(static_cast<bool>(other.auto_wrap_policy));
  const fsdp::FsdpOptions third =
      options_of({.sharding_strategy = "SHARD_GRAD_OP",
                  .backward_prefetch = "BACKWARD_POST"});
  EXPECT_EQ(third.sharding_strategy, fsdp::ShardingStrategy::kShardGradOp);
  EXPECT_EQ(third.backward_prefetch, fsdp::BackwardPrefetch::kPost);
}

TEST(AcceleratorFields, OfFsdpSayWhatIsWrapped) {
  FullyShardedDataParallelPlugin plugin;
  Linear layer("layer", 2, 2, InitOptions{});
  plugin.transformer_cls_names_to_wrap = {"Linear"};
  EXPECT_TRUE(fsdp_options(plugin, "no", 2).auto_wrap_policy(layer, false, 1));
  plugin.transformer_cls_names_to_wrap = {"GptBlock"};
  EXPECT_FALSE(fsdp_options(plugin, "no", 2).auto_wrap_policy(layer, false, 1));
  plugin.auto_wrap_policy = "SIZE_BASED_WRAP";
  plugin.min_num_params = 1000;
  const fsdp::WrapPolicy by_size =
      fsdp_options(plugin, "no", 2).auto_wrap_policy;
  EXPECT_FALSE(by_size(layer, false, 999));
  EXPECT_TRUE(by_size(layer, false, 1000));
}

TEST(AcceleratorFields, OfMegatronAreTheHybridChaptersOptions) {
  const hybrid::HybridOptions usual = hybrid_options({}, 8);
  EXPECT_EQ(usual.dp, 8);
  EXPECT_EQ(usual.recompute, "never");
  EXPECT_EQ(usual.zero_stage, 0);
  EXPECT_FALSE(usual.sequence_parallel);
  const hybrid::HybridOptions setup =
      hybrid_options({2, 2, 3, true, true, true}, 8);
  EXPECT_EQ(setup.tp, 2);
  EXPECT_EQ(setup.pp, 2);
  EXPECT_EQ(setup.dp, 2);
  EXPECT_EQ(setup.micro_batches, 3);
  EXPECT_TRUE(setup.sequence_parallel);
  EXPECT_EQ(setup.recompute, "always");
  EXPECT_EQ(setup.zero_stage, 1);
}

TEST(AcceleratorFields, ActivationCheckpointingIsOfTheBlocks) {
  for (const bool checkpoints : {false, true}) {
    const Fsdp plugin{.activation_checkpointing = checkpoints};
    on_prepared(plugin, [&](Accelerator& acc, Prepared& all, Module&) {
      int blocks = 0;
      for (const NamedModule& each :
           acc.unwrap_model(all.model).named_modules()) {
        const auto* block = dynamic_cast<const GptBlock*>(each.module);
        if (block == nullptr) continue;
        blocks += 1;
        EXPECT_EQ(block->recompute, checkpoints);
      }
      EXPECT_EQ(blocks, 2);
    });
  }
}

TEST(AcceleratorErrors, CpuRefusesARankOnAGpu) {
  Device gpu;
  try {
    gpu = Device::cuda(0);
  } catch (const Error&) {
    GTEST_SKIP() << "no GPU is visible here";
  }
  const std::string error = error_on_ranks(1, [&](ProcessGroup& world) {
    RankContext::current().device = gpu;
    AcceleratorOptions options;
    options.cpu = true;
    Accelerator acc(options, world);
  });
  expect_text(error, {"cpu true"});
}

TEST(AcceleratorConfig, RoundTrip) {
  const DeepSpeed plugin{.zero_stage = 3,
                         .gradient_clipping = 0.5,
                         .offload_optimizer_device = "cpu"};
  const std::string text = deepspeed_config(plugin, known()).to_json();
  EXPECT_EQ(engine::DeepSpeedConfig::parse(text, "text").to_json(), text);
  // The same script, given this config, adds nothing to it
  EXPECT_EQ(deepspeed_config({.hf_ds_config = text}, known()).to_json(), text);
}

TEST(AcceleratorConfig, OfTheConfigAloneTrainsAsTheScriptsOptimizer) {
  Script script;
  script.batch_size = 2;
  script.max_norm = 0;
  script.options.plugin = stage(1);
  const std::vector<Trace> native = run_on(2, script);
  script.options.plugin = DeepSpeed{
      .zero_stage = 1,
      .hf_ds_config =
          R"({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}})"};
  // Without a type, the script's optimizer only fills "auto"
  script.optimizer.type = "";
  EXPECT_EQ(run_on(2, script)[0].weights, native[0].weights);
}

}  // namespace
}  // namespace shardbook::accelerate
