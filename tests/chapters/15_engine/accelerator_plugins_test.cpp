// One script, any plugin: the losses equal one device's.

#include "tests/chapters/15_engine/accelerator_support.h"

namespace shardbook::accelerate {
namespace {

struct Case {
  std::string name;
  Plugin plugin;
  int ranks = 1;
  int sharing = 1;  ///< ranks that share a model
};

std::vector<Case> cases() {
  std::vector<Case> all;
  const auto add = [&](const std::string& name, const Plugin& plugin, int ranks,
                       int sharing = 1) {
    all.push_back(
        {name + "On" + std::to_string(ranks), plugin, ranks, sharing});
  };
  for (const int ranks : {1, 2, 4}) {
    add("Ddp", Ddp{}, ranks);
    add("FsdpFullShard", Fsdp{}, ranks);
    add("Fsdp2FullShard", Fsdp{.fsdp_version = 2}, ranks);
    for (int number = 0; number <= 3; ++number) {
      add("DeepSpeed" + std::to_string(number),
          DeepSpeed{.zero_stage = number, .gradient_clipping = 0.2}, ranks);
    }
    add("MegatronAlone", Megatron{}, ranks);
  }
  add("FsdpShardGradOp",
      Fsdp{.sharding_strategy = "SHARD_GRAD_OP",
           .auto_wrap_policy = "SIZE_BASED_WRAP",
           .min_num_params = 1000,
           .backward_prefetch = "BACKWARD_POST"},
      2);
  add("FsdpNoShard",
      Fsdp{.sharding_strategy = "NO_SHARD",
           .auto_wrap_policy = "NO_WRAP",
           .backward_prefetch = "NO_PREFETCH",
           .activation_checkpointing = true},
      2);
  add("FsdpHybridShard",
      Fsdp{.sharding_strategy = "HYBRID_SHARD",
           .shard_size = 2,
           .cpu_offload = true,
           .use_orig_params = true},
      4);
  add("DeepSpeedOffload",
      DeepSpeed{.zero_stage = 3,
                .gradient_clipping = 0.2,
                .offload_optimizer_device = "cpu",
                .offload_param_device = "cpu"},
      2);
  add("MegatronTp", Megatron{2, 1, 1}, 2, 2);
  add("MegatronPp", Megatron{1, 2, 2}, 2, 2);
  add("MegatronTpPp", Megatron{2, 2, 2, true, true}, 4, 4);
  add("MegatronDistributedOptimizer", Megatron{2, 1, 2, true, false, true}, 4,
      2);
  return all;
}

class AcceleratorPlugins : public testing::TestWithParam<Case> {};

TEST_P(AcceleratorPlugins, SameScriptHasTheLossesOfOneDevice) {
  const Case& param = GetParam();
  constexpr std::int64_t kAccumulation = 2, kBatch = 16, kSteps = 3;
  const int dp = param.ranks / param.sharing;
  Script script;
  script.options.plugin = param.plugin;
  script.options.gradient_accumulation_steps = kAccumulation;
  script.batch_size = kBatch / (kAccumulation * dp);
  script.samples = kBatch * kSteps;
  // On one device the rate moves once per step, here dp times
  script.rate = [dp](std::int64_t k) {
    return 0.01 / (1 + static_cast<double>(k) / dp);
  };
  const std::vector<Trace> ranks = run_on(param.ranks, script);

  script.rate = [](std::int64_t k) { return 0.01 / (1 + double(k)); };
  const ReferenceRun one = on_one_device(script, kBatch, kSteps);
  for (const Trace& trace : ranks) {
    EXPECT_LT(largest_gap(trace.losses, one.losses), kTolerance);
    EXPECT_LT(largest_gap(trace.norms, one.grad_norms), kTolerance);
    EXPECT_EQ(trace.scheduler_steps, kSteps * dp);
  }
  EXPECT_LT(apart(ranks[0].weights, weights_of(one.parameters)), kTolerance);
  // Data-parallel ranks read different samples
  if (dp > 1) {
    EXPECT_NE(ranks[0].batches, ranks.back().batches);
  }
}

INSTANTIATE_TEST_SUITE_P(All, AcceleratorPlugins, testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

// Plugins differ only in the last bits: with the ranks in one order, not at
// all.
TEST(AcceleratorPlugins, EngineOfStageZeroEqualsDdpBitForBit) {
  Script script;
  script.batch_size = 2;
  script.max_norm = 0;
  const std::vector<Trace> ddp = run_on(2, script);
  // DeepSpeed clips unless told otherwise
  script.options.plugin = DeepSpeed{.zero_stage = 0, .gradient_clipping = 0};
  const std::vector<Trace> engine = run_on(2, script);
  EXPECT_EQ(ddp[0].losses, engine[0].losses);
  EXPECT_EQ(ddp[0].weights, engine[0].weights);
}

}  // namespace
}  // namespace shardbook::accelerate
