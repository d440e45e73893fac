// The errors of prepare, and the config that it creates.

#include "chapters/common/models/models.h"
#include "core/layers.h"
#include "tests/chapters/15_engine/accelerator_support.h"
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

template <typename P>
std::function<void(Script&)> with(const std::function<void(P&)>& change) {
  return [change](Script& script) {
    P plugin;
    change(plugin);
    script.options.plugin = plugin;
  };
}

std::function<void(Script&)> with_config(const std::string& text) {
  return with<DeepSpeedPlugin>(
      [text](DeepSpeedPlugin& plugin) { plugin.hf_ds_config = text; });
}

std::vector<Refused> refused() {
  using Fsdp = FullyShardedDataParallelPlugin;
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
       with<Fsdp>([](Fsdp& p) { p.sharding_strategy = "FULL"; }),
       {"sharding_strategy", "FULL", "HYBRID_SHARD"}},
      {"FsdpVersion",
       with<Fsdp>([](Fsdp& p) { p.fsdp_version = 3; }),
       {"fsdp_version 3", "give 1 or 2"}},
      {"ShardSize",
       with<Fsdp>([](Fsdp& p) { p.shard_size = 2; }),
       {"shard_size 2", "FULL_SHARD"}},
      {"HybridWithoutSize",
       with<Fsdp>([](Fsdp& p) { p.sharding_strategy = "HYBRID_SHARD"; }),
       {"shard_size", "HYBRID_SHARD"}},
      {"WrapPolicy",
       with<Fsdp>([](Fsdp& p) { p.auto_wrap_policy = "LAYERS"; }),
       {"auto_wrap_policy", "LAYERS", "NO_WRAP"}},
      {"Prefetch",
       with<Fsdp>([](Fsdp& p) { p.backward_prefetch = "EARLY"; }),
       {"backward_prefetch", "EARLY", "BACKWARD_PRE"}},
      {"StateDictType",
       with<Fsdp>([](Fsdp& p) { p.state_dict_type = "FULL_STATE_DICT"; }),
       {"state_dict_type", "FULL_STATE_DICT", "SHARDED_STATE_DICT"}},
      {"InitFlag",
       with<DeepSpeedPlugin>([](DeepSpeedPlugin& p) {
         p.zero_stage = 3;
         p.zero3_init_flag = true;
       }),
       {"zero3_init_flag", "host"}},
      {"Nvme",
       with<DeepSpeedPlugin>(
           [](DeepSpeedPlugin& p) { p.offload_param_device = "nvme"; }),
       {"offload_param_device", "nvme", "cpu"}},
      {"OffloadOfStageZero",
       with<DeepSpeedPlugin>([](DeepSpeedPlugin& p) {
         p.zero_stage = 0;
         p.offload_optimizer_device = "cpu";
       }),
       {"/zero_optimization/offload_optimizer", "/zero_optimization/stage 0"}},
      {"TwoStages",
       with<DeepSpeedPlugin>([](DeepSpeedPlugin& p) {
         p.zero_stage = 2;
         p.hf_ds_config = R"({"zero_optimization": {"stage": 3}})";
       }),
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
         with_config(R"({"scheduler": {"type": "WarmupLR"}})")(s);
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
       with<DeepSpeedPlugin>(
           [](DeepSpeedPlugin& p) { p.hf_ds_config = "/nowhere/ds.json"; }),
       {"hf_ds_config", "/nowhere/ds.json"}},
      {"TpDegree",
       with<MegatronLMPlugin>([](MegatronLMPlugin& p) { p.tp_degree = 3; }),
       {"tp_degree 3", "2 ranks"}},
      {"PpDegree",
       with<MegatronLMPlugin>([](MegatronLMPlugin& p) { p.pp_degree = 0; }),
       {"pp_degree 0"}},
      {"MicroBatches",
       with<MegatronLMPlugin>(
           [](MegatronLMPlugin& p) { p.num_micro_batches = 2; }),
       {"num_micro_batches 2"}},
      {"SequenceParallelism",
       with<MegatronLMPlugin>(
           [](MegatronLMPlugin& p) { p.sequence_parallelism = true; }),
       {"sequence_parallelism", "tp_degree"}},
      {"Heads",
       with<MegatronLMPlugin>([](MegatronLMPlugin& p) { p.tp_degree = 4; }),
       {"tp_degree 4", "2 heads"},
       4},
  };
}

class AcceleratorErrors : public testing::TestWithParam<Refused> {};

TEST_P(AcceleratorErrors, NameTheFieldsAndKeys) {
  const Refused& param = GetParam();
  Script script;
  script.max_norm = 0;
  param.change(script);
  const std::string error = error_on_ranks(
      param.ranks, [&](ProcessGroup& world) { run_script(script, world); });
  ASSERT_FALSE(error.empty());
  for (const std::string& word : param.words) {
    EXPECT_NE(error.find(word), std::string::npos) << word << " in: " << error;
  }
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
  const std::string error = error_on_ranks(
      2, [&](ProcessGroup& world) { run_script(script, world); });
  expect_text(error, {"clip_grad_norm_", "model.parameters()"});
}

TEST(AcceleratorErrors, MegatronHasNoForwardAndNoModelToUnwrap) {
  Script script;
  script.options.plugin = MegatronLMPlugin{};
  for (const bool unwraps : {true, false}) {
    script.clip = [=](Accelerator& acc, PreparedModel& model) {
      if (unwraps) {
        acc.unwrap_model(model);
      } else {
        model(Tensor::zeros({1, 8}, {DType::kI64, Device()}));
      }
    };
    const std::string error = error_on_ranks(
        2, [&](ProcessGroup& world) { run_script(script, world); });
    expect_text(error, {unwraps ? "get_state_dict" : "model.loss(batch)"});
  }
}

// --- The config that prepare makes -------------------------------------------

KnownValues known() {
  KnownValues values;
  values.micro_batch_size = 3;
  values.accumulation = 2;
  values.data_parallel_ranks = 4;
  values.optimizer.params.lr = 0.02;
  values.optimizer.params.weight_decay = 0.1;
  values.warmup_num_steps = 5;
  values.total_num_steps = 50;
  values.hidden_size = 20;
  values.mixed_precision = "bf16";
  return values;
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
  EXPECT_EQ(config.batch.train, 24);
  EXPECT_EQ(config.batch.micro, 3);
  EXPECT_EQ(config.batch.accumulation, 2);
  EXPECT_EQ(config.gradient_clipping, 1.0);
  EXPECT_TRUE(config.bf16);
  EXPECT_FALSE(config.fp16.enabled);
  EXPECT_EQ(config.optimizer.params.lr, 0.02);
  EXPECT_EQ(config.optimizer.params.weight_decay, 0.1);
  EXPECT_EQ(config.scheduler.warmup_min_lr, 0);
  EXPECT_EQ(config.scheduler.warmup_max_lr, 0.02);
  EXPECT_EQ(config.scheduler.warmup_num_steps, 5);
  EXPECT_EQ(config.scheduler.total_num_steps, 50);
  EXPECT_EQ(config.zero.reduce_bucket_size, 400);
  EXPECT_EQ(config.zero.stage3_prefetch_bucket_size, 360);
  EXPECT_EQ(config.zero.stage3_param_persistence_threshold, 200);
  EXPECT_EQ(config.zero.offload_optimizer.device, "none");
}

TEST(AcceleratorConfig, FieldsOfThePluginBecomeKeys) {
  DeepSpeedPlugin plugin = stage(3);
  plugin.gradient_clipping = 0.5;
  plugin.offload_optimizer_device = "cpu";
  plugin.offload_param_device = "cpu";
  const engine::DeepSpeedConfig config = deepspeed_config(plugin, known());
  EXPECT_EQ(config.zero.stage, 3);
  EXPECT_EQ(config.gradient_clipping, 0.5);
  EXPECT_EQ(config.zero.offload_optimizer.device, "cpu");
  EXPECT_EQ(config.zero.offload_param.device, "cpu");
  EXPECT_TRUE(config.bf16);
  // Without fields and config: stage 2, and DeepSpeed's clipping
  const engine::DeepSpeedConfig usual = deepspeed_config({}, known());
  EXPECT_EQ(usual.zero.stage, 2);
  EXPECT_EQ(usual.gradient_clipping, 1);
}

TEST(AcceleratorFields, OfFsdpAreItsOptions) {
  FullyShardedDataParallelPlugin plugin;
  const fsdp::FsdpOptions usual = fsdp_options(plugin, "no", 4);
  EXPECT_EQ(usual.sharding_strategy, fsdp::ShardingStrategy::kFullShard);
  EXPECT_EQ(usual.backward_prefetch, fsdp::BackwardPrefetch::kPre);
  EXPECT_FALSE(usual.cpu_offload.offload_params);
  EXPECT_FALSE(usual.use_orig_params);
  EXPECT_TRUE(usual.sync_module_states);
  plugin.cpu_offload = true;
  plugin.use_orig_params = true;
  plugin.sync_module_states = false;
  plugin.auto_wrap_policy = "NO_WRAP";
  const fsdp::FsdpOptions other = fsdp_options(plugin, "no", 4);
  EXPECT_TRUE(other.cpu_offload.offload_params);
  EXPECT_TRUE(other.use_orig_params);
  EXPECT_FALSE(other.sync_module_states);
  EXPECT_FALSE(static_cast<bool>(other.auto_wrap_policy));
  for (const auto& [name, strategy] :
       {std::pair{"SHARD_GRAD_OP", fsdp::ShardingStrategy::kShardGradOp},
        std::pair{"NO_SHARD", fsdp::ShardingStrategy::kNoShard}}) {
    plugin.sharding_strategy = name;
    EXPECT_EQ(fsdp_options(plugin, "no", 4).sharding_strategy, strategy);
  }
  for (const auto& [name, prefetch] :
       {std::pair{"BACKWARD_POST", fsdp::BackwardPrefetch::kPost},
        std::pair{"NO_PREFETCH", fsdp::BackwardPrefetch::kNone}}) {
    plugin.backward_prefetch = name;
    EXPECT_EQ(fsdp_options(plugin, "no", 4).backward_prefetch, prefetch);
  }
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
    on_ranks(2, [&](ProcessGroup& world) {
      Script script;
      FullyShardedDataParallelPlugin plugin;
      plugin.activation_checkpointing = checkpoints;
      script.options.plugin = plugin;
      const Options options = options_of(script);
      const LoadedModel loaded = build_model(options);
      Accelerator acc(script.options, world);
      Prepared all = acc.prepare(*loaded.model, script.optimizer,
                                 loader_of(script, options, loaded.config));
      int blocks = 0;
      for (const NamedModule& each :
           acc.unwrap_model(all.model).named_modules()) {
        const auto* block = dynamic_cast<const GptBlock*>(each.module);
        if (block == nullptr) continue;
        blocks += 1;
        EXPECT_EQ(block->recompute, checkpoints);
      }
      EXPECT_EQ(blocks, 2);
      return 0;
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
  DeepSpeedPlugin plugin = stage(3);
  plugin.gradient_clipping = 0.5;
  plugin.offload_optimizer_device = "cpu";
  const std::string text = deepspeed_config(plugin, known()).to_json();
  EXPECT_EQ(engine::DeepSpeedConfig::parse(text, "text").to_json(), text);
  // The same script, given this config, adds nothing to it
  DeepSpeedPlugin again;
  again.hf_ds_config = text;
  EXPECT_EQ(deepspeed_config(again, known()).to_json(), text);
}

TEST(AcceleratorConfig, OfTheConfigAloneTrainsAsTheScriptsOptimizer) {
  Script script;
  script.batch_size = 2;
  script.max_norm = 0;
  script.options.plugin = stage(1);
  const std::vector<Trace> native = run_on(2, script);
  DeepSpeedPlugin plugin = stage(1);
  plugin.hf_ds_config =
      R"({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}})";
  script.options.plugin = plugin;
  // Without a type, the script's optimizer only fills "auto"
  script.optimizer.type = "";
  EXPECT_EQ(run_on(2, script)[0].weights, native[0].weights);
}

}  // namespace
}  // namespace shardbook::accelerate
