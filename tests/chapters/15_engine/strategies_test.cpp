// The registry: every strategy that a config can choose, against one device.

#include "chapters/15_engine/strategies.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "chapters/15_engine/engine_strategy.h"
#include "comm/launch.h"
#include "core/context.h"
#include "tests/chapters/15_engine/choice_support.h"
#include "tests/support/errors.h"

namespace shardbook::engine {
namespace {

struct Case {
  std::string name, chapter;
  int world = 4;
  std::string config;
};

/// Keys for a batch of 24, g = 2 and a norm that clipping changes.
Case with(const std::string& name, const std::string& chapter, int world,
          const std::string& keys, int g = 2) {
  return {name, chapter, world,
          R"({"train_batch_size": 24, "gradient_accumulation_steps": )" +
              std::to_string(g) + R"(, "gradient_clipping": 0.5)" + keys + "}"};
}

std::string zero(const std::string& keys) {
  return R"(, "zero_optimization": {)" + keys + "}";
}

std::string recompute(const std::string& what) {
  return R"(, "shardbook": {"recompute": ")" + what + R"("})";
}

std::vector<Case> all_cases() {
  const std::string cpu = R"("offload_optimizer": {"device": "cpu"})";
  const std::string tp2 = R"("tensor_parallel": {"size": 2})";
  return {
      with("OneDevice", "02_ddp", 1, ""),
      with("Ddp", "02_ddp", 4, ""),
      with("DdpOf3", "02_ddp", 3, ""),
      with("DdpOf8", "02_ddp", 8, "", 1),
      with("Zero1", "03_zero_fsdp", 4, zero(R"("stage": 1)")),
      with("Zero2", "03_zero_fsdp", 3,
           zero(R"("stage": 2, "reduce_bucket_size": 500)")),
      with("Zero2Owners", "03_zero_fsdp", 2,
           zero(R"("stage": 2, "allgather_partitions": false)")),
      with("Zero2Offload", "03_zero_fsdp", 2, zero(R"("stage": 2, )" + cpu)),
      with("Zero3", "03_zero_fsdp", 4,
           zero(R"("stage": 3, "stage3_param_persistence_threshold": 100)")),
      with("Zero3Offload", "03_zero_fsdp", 2,
           zero(R"("stage": 3, "offload_param": {"device": "cpu"}, )" + cpu)),
      with("Zero3Released", "03_zero_fsdp", 2,
           zero(R"("stage": 3, "stage3_param_persistence_threshold": 0,
               "stage3_max_reuse_distance": 0)")),
      with("Zero3FewLive", "03_zero_fsdp", 3,
           zero(R"("stage": 3, "stage3_param_persistence_threshold": 0,
               "stage3_prefetch_bucket_size": 4000,
               "stage3_max_live_parameters": 6000)")),
      with("Zero1DividesAfter", "03_zero_fsdp", 3,
           zero(R"("stage": 1, "reduce_scatter": false)")),
      with("Zero2DividesInParts", "03_zero_fsdp", 4,
           zero(R"("stage": 2, "reduce_scatter": false)") +
               R"(, "gradient_predivide_factor": 2)"),
      with("Zero1Wire", "03_zero_fsdp", 2,
           zero(R"("stage": 1)") + R"(, "communication_data_type": "fp32")"),
      with("Zero2Wire", "03_zero_fsdp", 3,
           zero(R"("stage": 2, "reduce_bucket_size": 500)") +
               R"(, "communication_data_type": "fp32")"),
      with("Zero3Wire", "03_zero_fsdp", 2,
           zero(R"("stage": 3)") + R"(, "communication_data_type": "fp32")"),
      with("Fsdp2", "03_zero_fsdp", 3,
           zero(R"("stage": 3)") + R"(, "shardbook": {"sharding": "fsdp2"})"),
      with("Fsdp2Offload", "03_zero_fsdp", 2,
           zero(R"("stage": 3, "offload_param": {"device": "cpu"}, )" + cpu) +
               R"(, "shardbook": {"sharding": "fsdp2",
                   "recompute": "blocks"})"),
      with("Fsdp", "03_zero_fsdp", 4,
           zero(R"("stage": 3)") + R"(, "shardbook": {"sharding": "fsdp"})"),
      with("Grid2D", "08_tensor_parallel_2d", 4,
           R"(, "shardbook": {"tensor_parallel": {"size": 4, "mode": "2d"}})"),
      with("Grid25D", "09_tensor_parallel_2p5d", 8,
           R"(, "shardbook": {"tensor_parallel": {"size": 8, "mode": "2.5d",
               "depth": 2}})"),
      with("Cube", "10_tensor_parallel_3d", 8,
           R"(, "shardbook": {"tensor_parallel": {"size": 8, "mode": "3d"}})"),
      with("Experts", "13_moe", 4,
           zero(R"("stage": 2, )" + cpu) +
               R"(, "shardbook": {"experts": {"num_experts": 8,
                   "ep_size": 2}})"),
      with("ExpertsInStages", "14_hybrid_3d", 4,
           R"(, "pipeline": {"stages": 2}, "shardbook": {"experts":
               {"num_experts": 4, "ep_size": 2}})"),
      with("Tensor", "14_hybrid_3d", 4, R"(, "shardbook": {)" + tp2 + "}"),
      with(
          "TensorZero3", "14_hybrid_3d", 4,
          zero(R"("stage": 3)") + R"(, "tensor_parallel": {"autotp_size": 2})"),
      with("Pipeline", "14_hybrid_3d", 2, R"(, "pipeline": {"stages": 2})", 4),
      with("PipelineRecomputes", "14_hybrid_3d", 2,
           R"(, "pipeline": {"stages": 2, "partition": "parameters",
               "activation_checkpoint_interval": 1})",
           4),
      with("DdpRecomputes", "02_ddp", 2, recompute("blocks")),
      with("Zero2Recomputes", "03_zero_fsdp", 3,
           zero(R"("stage": 2)") + recompute("blocks")),
      with("Zero3Recomputes", "03_zero_fsdp", 2,
           zero(R"("stage": 3)") + recompute("blocks")),
      with("FsdpRecomputes", "03_zero_fsdp", 2,
           zero(R"("stage": 3)") + R"(, "shardbook": {"sharding": "fsdp",
               "recompute": "blocks"})"),
      with("Zero2RecomputesAttention", "14_hybrid_3d", 2,
           zero(R"("stage": 2)") + recompute("attention")),
      with("PipelineRecomputesBlocks", "14_hybrid_3d", 2,
           R"(, "pipeline": {"stages": 2})" + recompute("blocks"), 4),
      with("Hybrid", "14_hybrid_3d", 8,
           zero(R"("stage": 1)") + R"(, "pipeline": {"stages": 2},
               "shardbook": {)" +
               tp2 + "}",
           3),
      with("Context", "14_hybrid_3d", 4,
           R"(, "pipeline": {"stages": 2}, "shardbook": {"schedule": "zb-h1",
               "context_parallel": {"size": 2, "layout": "zigzag"}})",
           3)};
}

class EngineStrategies : public testing::TestWithParam<Case> {};

TEST_P(EngineStrategies, EveryClaimHolds) {
  expect_claims(train_config(options_for(GetParam().world), GetParam().config));
}

TEST_P(EngineStrategies, ComeFromTheirChapter) {
  const Options options = options_for(GetParam().world);
  const auto config = DeepSpeedConfig::parse(GetParam().config, "ds.json");
  const Choice choice = choose(options, config);
  EXPECT_EQ(choice.chapter, GetParam().chapter);
  EXPECT_EQ(choice.sizes.train, 24);
  expect_text(describe(choice, config), {GetParam().chapter});
}

INSTANTIATE_TEST_SUITE_P(All, EngineStrategies, testing::ValuesIn(all_cases()),
                         [](const auto& info) { return info.param.name; });

double peak_of_first_rank(const Report& report, MemoryKind kind) {
  return report.ranks.at(0).peak.at(static_cast<std::size_t>(kind)).counted;
}

// The first stage's positions outweigh all blocks together.
TEST(EnginePipeline, PartitionAndRecomputationAreThoseOfTheKeys) {
  const auto peak = [](const std::string& keys, MemoryKind kind) {
    Options options = options_for(2);
    options.model =
        R"({"n_embd": 16, "n_layer": 4, "n_head": 4, "vocab_size": 31,
            "n_positions": 2000})";
    const Report report = train_config(options, R"({"train_batch_size": 24,
            "gradient_accumulation_steps": 4, "pipeline": {"stages": 2)" +
                                                    keys + "}}");
    return peak_of_first_rank(report, kind);
  };
  EXPECT_LT(peak(R"(, "partition": "parameters")", MemoryKind::kParameter),
            peak(R"(, "partition": "uniform")", MemoryKind::kParameter));
  EXPECT_LT(
      peak(R"(, "activation_checkpoint_interval": 1)", MemoryKind::kActivation),
      peak("", MemoryKind::kActivation));
}

// Blocks gathered ahead and kept fill buffers in forward, when no loss travels
// beside them yet.
TEST(EngineStrategies, WhatIsGatheredAheadOfTheLossIsCountedAlone) {
  Options options = options_for(2);
  options.model =
      R"({"n_embd": 16, "n_layer": 4, "n_head": 4, "vocab_size": 31,
          "n_positions": 20})";
  for (const std::string distance : {"0", "1e9"}) {
    expect_claims(train_config(
        options,
        R"({"train_batch_size": 24, "zero_optimization": {"stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": )" +
            distance + "}}"));
  }
}

// --- The documents' three configs, as their files say ------------------------

nlohmann::json document(const std::string& name) {
  std::ifstream file(SHARDBOOK_ROOT "/chapters/15_engine/configs/" + name);
  return nlohmann::json::parse(file);
}

/// Four steps on four ranks; getting_started.json's rate is 0 in the first two.
void expect_claims_of_document(const nlohmann::json& config, DType dtype) {
  Options options = options_for(4);
  options.batch = 16;
  options.steps = 4;
  options.dtype = dtype;
  const Report report = train_config(options, config.dump());
  expect_claims(report);
  EXPECT_EQ(report.losses.size(), 4U);
  EXPECT_EQ(report.not_finite, "");
}

TEST(EngineDocuments, GettingStartedTrainsAtEveryStage) {
  nlohmann::json config = document("getting_started.json");
  for (const int stage : {0, 1, 2, 3}) {
    SCOPED_TRACE("stage " + std::to_string(stage));
    config["zero_optimization"]["stage"] = stage;
    expect_claims_of_document(config, DType::kF32);
  }
}

TEST(EngineDocuments, Gpt2Trains) {
  expect_claims_of_document(document("gpt2.json"), DType::kF32);
}

// The model of that config itself, on shapes.
TEST(EngineDocuments, Gpt2IsTrainedByItsOwn) {
  Options options = options_for(4);
  options.model = "gpt2";
  options.backend = "sim";
  options.cluster = "dgx-a100";
  options.dtype = DType::kF32;
  options.batch = 16;
  options.seq = 64;
  options.steps = 2;
  const Report report = train_config(options, document("gpt2.json").dump());
  EXPECT_GT(report.time.step_s, 0);
  ASSERT_FALSE(report.ranks.empty());
  for (const RankReport& rank : report.ranks) {
    EXPECT_GT(rank.bytes.counted, 0);
    EXPECT_NEAR(rank.bytes.counted, rank.bytes.predicted,
                1e-9 * rank.bytes.counted);
  }
}

TEST(EngineDocuments, ExpertsTrain) {
  expect_claims_of_document(document("moe.json"), DType::kF64);
}

// --- f16: every overflow skips on all ranks and on the one device ------------

TEST(EngineSkippedSteps, AreCountedInBytesAndMemory) {
  for (const std::string stage : {"0", "1", "2", "3"}) {
    SCOPED_TRACE("stage " + stage);
    Options options = options_for(2);
    options.dtype = DType::kF32;
    options.steps = 6;
    // 2^40 overflows, each time halved: all six steps are skipped. From 2^18
    // some are not
    for (const std::string power : {"40", "18"}) {
      SCOPED_TRACE("2^" + power);
      const Report report = train_config(
          options, R"({"train_batch_size": 24, "fp16": {"enabled": true,
              "hysteresis": 1, "initial_scale_power": )" +
                       power + R"(}, "zero_optimization": {"stage": )" + stage +
                       "}}");
      expect_claims(report);
    }
  }
}

// --- Pipelines have train_batch alone ----------------------------------------

TEST(EnginePipeline, RefusesForwardBackwardAndStep) {
  const auto config = DeepSpeedConfig::parse(
      R"({"train_batch_size": 24, "gradient_accumulation_steps": 4,
          "pipeline": {"stages": 2}})",
      "ds.json");
  const Options options = options_for(2);
  const Choice choice = choose(options, config);
  const auto error = [&](const std::function<void(Engine&)>& call) {
    return shardbook::error_of([&] {
      run_ranks(2, [&](ProcessGroup& world) {
        DeviceMesh mesh(world, choice.topology);
        const auto strategy = choice.make(options, mesh);
        call(dynamic_cast<ConfiguredStrategy&>(*strategy).engine());
      });
    });
  };
  const std::string sentence = "call train_batch";
  const auto refuses = [&](const std::function<void(Engine&)>& call) {
    return error(call).find(sentence) != std::string::npos;
  };
  EXPECT_TRUE(refuses([](Engine& e) { e.forward(Tensor::full({1}, 0, {})); }));
  EXPECT_TRUE(refuses([](Engine& e) { e.backward(Tensor::full({}, 0, {})); }));
  EXPECT_TRUE(refuses([](Engine& e) { e.step(); }));
  EXPECT_TRUE(refuses([](Engine& e) { NoSync scope = e.no_sync(); }));
  // One step is g micro-batches; all ranks have the same mean loss
  std::vector<double> losses(2);
  EXPECT_EQ(error([&](Engine& e) {
              const double loss = e.train_batch();
              losses[static_cast<std::size_t>(RankContext::current().rank)] =
                  loss;
              SB_CHECK(e.global_steps() == 1 && e.micro_steps() == 4 &&
                           e.global_samples() == 24,
                       "counts");
            }),
            "");
  EXPECT_EQ(losses[0], losses[1]);
  EXPECT_NEAR(losses[0], std::log(31.0), 0.5);
}

// --- What is refused ---------------------------------------------------------

std::string refusal(int world, const std::string& text,
                    const std::string& model = "") {
  return shardbook::error_of([&] {
    Options options = options_for(world);
    if (!model.empty()) options.model = model;
    const auto config = DeepSpeedConfig::parse(text, "ds.json");
    apply_config(config, data_parallel_ranks(options, config), {}, options);
    choose(options, config);
  });
}

// A rank's own gradients are dp times their share of the mean. From some scale
// on they overflow, and so do one device's. If every step is skipped, nothing
// is published.
TEST(EngineStrategies, F16OverflowsWhereARankDoes) {
  bool has_updated = false, has_skipped = false;
  for (const int stage : {1, 3}) {
    for (int power = 16; power <= 21; ++power) {
      const std::string config =
          R"({"fp16": {"enabled": true, "hysteresis": 1,
               "initial_scale_power": )" +
          std::to_string(power) +
          R"(}, "zero_optimization": {"reduce_bucket_size": 500, "stage": )" +
          std::to_string(stage) + "}}";
      SCOPED_TRACE(config);
      Options options = options_for(4);
      // The new parameters are the largest message: the model is larger than a
      // bucket.
      options.model = R"({"n_embd": 16, "n_layer": 4, "n_head": 4,
                          "vocab_size": 31, "n_positions": 20})";
      options.steps = 1;
      const Report report = train_config(options, config);
      expect_claims(report);
      const bool is_finite = std::isfinite(report.grad_norms.at(0));
      (is_finite ? has_updated : has_skipped) = true;
    }
  }
  EXPECT_TRUE(has_updated && has_skipped);
}

TEST(EngineStrategies, SayWhyTheyRefuse) {
  struct Refused {
    int world;
    std::string config, sentence;
  };
  for (const Refused& each : std::vector<Refused>{
           {4, R"({"pipeline": {"stages": 3}})",
            "--world-size 4: ds.json has tensor parallelism 1 x context "
            "parallelism 1 x pipeline stages 3; give a multiple of 3"},
           {4, R"({"train_batch_size": 10})", "train_batch_size 10 is not"},
           {2, R"({"pipeline": {"stages": 2}, "prescale_gradients": true})",
            "/prescale_gradients with /pipeline/stages"},
           {2, R"({"pipeline": {"stages": 2}, "shardbook": {"schedule":
               "pipedream"}})",
            "each stage updates by itself"},
           {4, R"({"shardbook": {"tensor_parallel": {"size": 4, "mode": "2d"}},
               "fp16": {"enabled": true}})",
            "/fp16/enabled with 2d tensor"},
           {4, R"({"shardbook": {"tensor_parallel": {"size": 2, "mode":
               "2d"}}})",
            "give it size 4"},
           {4, R"({"shardbook": {"experts": {"num_experts": [4, 8]}},
               "pipeline": {"stages": 2}})",
            "a list of num_experts"},
           {4, R"({"shardbook": {"sharding": "fsdp", "context_parallel":
               {"size": 2}}, "zero_optimization": {"stage": 3}})",
            "/shardbook/sharding \"fsdp\" with stages"},
           {2, R"({"zero_optimization": {"stage": 3, "offload_optimizer":
               {"device": "cpu"}}, "shardbook": {"sharding": "fsdp"}})",
            "/zero_optimization/offload_param as well"},
           {2, R"({"shardbook": {"recompute": "blocks"}, "pipeline": {"stages":
               2, "activation_checkpoint_interval": 1}})",
            "which runs whole stages again"},
           {4, R"({"shardbook": {"recompute": "blocks", "tensor_parallel":
               {"size": 4, "mode": "2d"}}})",
            "keeps all activations"},
           {2, R"({"shardbook": {"recompute": "attention", "sharding": "fsdp"},
               "zero_optimization": {"stage": 3}})",
            "runs whole blocks again"},
           {2, R"({"shardbook": {"recompute": "attention"}, "zero_optimization":
               {"stage": 2, "offload_optimizer": {"device": "cpu"}}})",
            "offload_optimizer with /shardbook/recompute \"attention\""}}) {
    const std::string error = refusal(each.world, each.config);
    EXPECT_NE(error.find(each.sentence), std::string::npos)
        << each.config << "\n"
        << error;
  }
  expect_text(refusal(2, "{}", "resnet18"), {"batch norm"});
}

// --- The config is printed if a run can begin ---------------------------------

// An error of a run is one of --print-config: of the file, of the choice of a
// chapter, of a strategy that is built.
TEST(EnginePrintConfig, RefusesWhatARunRefuses) {
  struct Case {
    const char* text;
    std::int64_t device_memory;
    const char* error;  ///< its beginning; empty: none
  };
  for (const Case& each : {
           Case{R"({"zero_optimization": {"stage": 2}})", 0, ""},
           Case{R"({"zero_optimization": {"stage": 3}, "bf16": {"enabled":
                    true}, "data_types": {"grad_accum_dtype": "fp32"},
                    "gradient_accumulation_steps": 2,
                    "shardbook": {"sharding": "fsdp"}})",
                0, "ds.json: /data_types/grad_accum_dtype \"fp32\" in bf16"},
           Case{R"({"zero_optimization": {"stage": 3}})", 1000,
                "out of memory on cpu:"},
       }) {
    Options options = options_for(2);
    options.dtype = DType::kF32;
    options.device_memory_bytes = each.device_memory;
    options.steps = 1;
    const auto error = [&](const auto& run) {
      return shardbook::error_of([&] {
        const auto config = DeepSpeedConfig::parse(each.text, "ds.json");
        Options filled = options;
        apply_config(config, data_parallel_ranks(options, config), {}, filled);
        run(filled, run_of(choose(filled, config)));
      });
    };
    const std::string of_run = error(run_and_compare);
    const std::string of_print = error(check_run);
    EXPECT_EQ(of_run.rfind(each.error, 0), 0U) << of_run;
    EXPECT_EQ(of_run.empty(), std::string(each.error).empty()) << of_run;
    EXPECT_EQ(of_print.empty(), of_run.empty()) << of_print;
  }
}

}  // namespace
}  // namespace shardbook::engine
