// Configs as people write them: Hjson, old names, zeros; all mistakes at once.

#include <algorithm>
#include <nlohmann/json.hpp>

#include "tests/chapters/15_engine/engine_support.h"

namespace shardbook::engine {
namespace {

using nlohmann::json;

TEST(EngineSpelling, CommentsAndACommaBeforeABracketAreRead) {
  const DeepSpeedConfig config = parse(R"({
    # Hjson, "as" DeepSpeed { reads it
    "train_batch_size": 8, // samples, of "all" ranks
    /* two
       lines, } */ "optimizer": {"type": "SGD", "params": {"lr": 5e-1,}, },
    "_remark": "no # comment, // here, \" and /* there */ ,}",
  })");
  EXPECT_EQ(config.batch.train, 8);
  EXPECT_EQ(config.optimizer.params.lr, 0.5);
  EXPECT_EQ(parse(R"({"optimizer": {"type": "Adam", "params":
                      {"betas": [0.5, 0.25, # both
                      ]}}})")
                .optimizer.params.beta2,
            0.25);
  // Positions refer to the original file
  expect_error("{ # one\n \"steps_per_print\": x}", "line 2, column 21");
  for (const char* text : {"{,}", "{\"steps_per_print\": 1,,}", "[,]",
                           "{} /* no end", "{\"steps_per_print\": ,}"}) {
    expect_error(text, "not JSON from line 1");
  }
}

TEST(EngineSpelling, OtherFormsThanJsonAreNamed) {
  const std::string no_quotes =
      " on: the name stage has no quotes, as in Hjson; put names in quotes and "
      "commas between entries";
  expect_error("{\n  # Hjson\n  stage: 1\n}", "line 3, column 3" + no_quotes);
  // A name that begins like a word of JSON
  expect_error("{\"a\": 1, true_stage: 1}",
               "the name true_stage has no quotes");
  const std::string yaml = "not JSON from line 2, column 1 on: this is YAML";
  expect_error(
      "# of `accelerate config`\ncompute_environment: LOCAL_MACHINE\n"
      "distributed_type: FSDP\n",
      yaml +
          " of `accelerate config`; give a file for DeepSpeed, which is "
          "JSON, such as its deepspeed_config_file");
  expect_error("# a config\nzero_optimization:\n  stage: 1\n",
               yaml + "; give JSON");
  expect_error("---\nzero_optimization:\n", "this is YAML; give JSON");
  // Neither
  expect_error("{\"steps_per_print\": x}", "column 20 on");
}

TEST(EngineSpelling, ZerosAndWholeNumbersWithExponents) {
  expect_kept(R"({"zero_optimization": {"stage": 3.0, "sub_group_size": 0,
      "reduce_bucket_size": 1, "allgather_bucket_size": 0,
      "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 5e8}})");
  // DeepSpeed 0.19.8 wants a bucket above 0, and would divide by steps_per_print
  expect_error(R"({"zero_optimization": {"reduce_bucket_size": 0}})",
               "/reduce_bucket_size: 0 is not allowed; give a whole number "
               "from 1");
  expect_error(R"({"steps_per_print": 0})", "/steps_per_print: 0 is not");
  EXPECT_EQ(parse(R"({"steps_per_print": null})").steps_per_print, 0);
  expect_error(R"({"zero_optimization": {"stage": 2.5}})",
               "/zero_optimization/stage: 2.5 is not allowed");
}

TEST(EngineSpelling, NamesWithoutStage3) {
  expect_values(
      parse(R"({"zero_optimization": {"stage": 3, "max_live_parameters": 1,
                "max_reuse_distance": 2, "prefetch_bucket_size": 3,
                "param_persistence_threshold": 4}})"),
      R"({"zero_optimization": {"stage3_max_live_parameters": 1,
          "stage3_max_reuse_distance": 2, "stage3_prefetch_bucket_size": 3,
          "stage3_param_persistence_threshold": 4}})");
  expect_error(R"({"zero_optimization": {"max_live_parameters": -1}})",
               "/zero_optimization/max_live_parameters: -1 is not allowed");
  expect_error(R"({"zero_optimization": {"max_live_parameters": 1,
                   "stage3_max_live_parameters": 1}})",
               "/zero_optimization/max_live_parameters: is another name of "
               "/zero_optimization/stage3_max_live_parameters");
}

TEST(EngineSpelling, OldFormsAndNull) {
  const DeepSpeedConfig old =
      parse(R"({"zero_optimization": true, "allgather_size": 1000,
                "bfloat16": {"enabled": true}})");
  EXPECT_EQ(old.zero.stage, 1);
  EXPECT_EQ(old.zero.allgather_bucket_size, 1000);
  EXPECT_TRUE(old.bf16);
  EXPECT_EQ(parse(R"({"zero_optimization": false})").zero.stage, 0);
  expect_error(R"({"allgather_size": 1000})",
               "/allgather_size: goes with the old form");
  expect_error(R"({"bf16": {"enabled": true}, "bfloat16": {}})",
               "/bfloat16: is another name of /bf16");
  EXPECT_FALSE(parse(R"({"zero_optimization": {"offload_optimizer": null,
                         "overlap_comm": null}, "communication_data_type":
                         null})")
                   .zero.offload_optimizer);
  EXPECT_EQ(parse(R"({"optimizer": {"type": "adamw"}})").optimizer.type,
            "AdamW");
  EXPECT_EQ(parse(R"({"optimizer": {"type": "ADAM"}})").optimizer.name(),
            "adamw");
}

TEST(EngineSpelling, NamesOfDtypes) {
  const DeepSpeedConfig config =
      parse(R"({"communication_data_type": "FP16", "bf16": {"enabled": true},
                "zero_optimization": {"stage": 1},
                "data_types": {"grad_accum_dtype": "torch.float32",
                               "param_dtype": "bfloat16"}})");
  EXPECT_EQ(config.communication_data_type, "fp16");
  EXPECT_EQ(config.grad_accum_dtype, "fp32");
  EXPECT_TRUE(remarks(config, "/data_types/param_dtype: has no effect here"));
  expect_error(R"({"data_types": {"param_dtype": "bf16"}})",
               "/data_types/param_dtype: bf16 is not offered");
  // Each of the two lists is DeepSpeed's
  expect_error(R"({"communication_data_type": "torch.float16"})",
               "\"torch.float16\" is unknown");
  expect_error(R"({"communication_data_type": ""})", "\"\" is unknown");
  expect_error(R"({"data_types": {"grad_accum_dtype": "FP32"}})",
               "\"FP32\" is unknown");
}

// DeepSpeed's classes convert values (pydantic 2.14); its plain readers do not.
TEST(EngineSpelling, ValuesOfClassesAreConverted) {
  const auto stage = [](const std::string& value) {
    return parse(R"({"zero_optimization": {"stage": )" + value + "}}")
        .zero.stage;
  };
  EXPECT_EQ(stage(R"("2")"), 2);
  EXPECT_EQ(stage(R"(" +3.0 ")"), 3);
  EXPECT_EQ(stage("true"), 1);
  EXPECT_EQ(stage("false"), 0);
  for (const char* value :
       {R"("2.5")", R"("2e0")", R"("x")", R"("")", "null"}) {
    expect_error(
        R"({"zero_optimization": {"stage": )" + std::string(value) + "}}",
        "/zero_optimization/stage: ");
  }
  const auto scatters = [](const std::string& value) {
    return parse(R"({"zero_optimization": {"stage": 1, "reduce_scatter": )" +
                 value + "}}")
        .zero.reduce_scatter;
  };
  for (const char* yes : {"1", "1.0", R"("1")", R"("True")", R"("YES")"}) {
    EXPECT_TRUE(scatters(yes)) << yes;
  }
  for (const char* no : {"0", R"("off")", R"("f")", R"("n")"}) {
    EXPECT_FALSE(scatters(no)) << no;
  }
  expect_error(R"({"zero_optimization": {"reduce_scatter": 2}})",
               "give true or false");
  EXPECT_EQ(parse(R"({"fp16": {"loss_scale": "1e2"}})").fp16.loss_scale, 100);
  expect_error(R"({"fp16": {"loss_scale": true}})", "/fp16/loss_scale: true");
  EXPECT_EQ(parse(R"({"fp16": {"hysteresis": "3.0"}})").fp16.hysteresis, 3);
  expect_error(R"({"fp16": {"loss_scale_window": "3.0"}})",
               "/fp16/loss_scale_window: \"3.0\"");
  expect_error(R"({"train_batch_size": "16"})", "\"16\" is not allowed");
  // Values without effect have types, too
  expect_error(R"({"wandb": {"enabled": "x"}})",
               "/wandb/enabled: \"x\" is not allowed; give true or false");
  expect_error(R"({"tensorboard": true})",
               "/tensorboard: true is not allowed; give an object");
  expect_error(R"({"timers": {"throughput": {"synchronised": true}}})",
               "/timers/throughput/synchronised: unknown key; did you mean "
               "\"synchronized\"?");
  expect_error(R"({"tensor_parallel": {"vocab_parallel_ce_backend": "x"}})",
               "give torch or liger");
  EXPECT_EQ(error_of(R"({"tensor_parallel": {"vocab_parallel_ce_backend":
                "liger", "vocab_parallel_lm_head": null, "tp": {"tp_size": "1"}},
                "wandb": {"enabled": "auto"}, "disable_python_gc": true,
                "data_types": {"keep_in_fp32_modules": "auto"},
                "zero_optimization": {"parameter_alignment": true}})"),
            "");
}

// Each is refused by DeepSpeed 0.19.8, or read as here.
TEST(EngineSpelling, BoundsAreDeepSpeeds) {
  const auto fp16 = [](const std::string& keys) {
    return R"({"fp16": {"enabled": true, )" + keys + "}}";
  };
  expect_error(fp16(R"("loss_scale_window": 0)"), "/fp16/loss_scale_window 0");
  expect_error(fp16(R"("min_loss_scale": 0)"), "/fp16/min_loss_scale 0");
  expect_error(fp16(R"("min_loss_scale": 0.5)"), "/min_loss_scale: 0.5 is not");
  EXPECT_EQ(error_of(fp16(R"("min_loss_scale": 0, "loss_scale": 8)")), "");
  EXPECT_EQ(parse(fp16(R"("initial_scale_power": -3, "hysteresis": 0)"))
                .loss_scale()
                .scale,
            0.125);
  EXPECT_EQ(parse(R"({"gradient_clipping": -1})").gradient_clipping, 0);
  const auto zero = [](int stage, const std::string& keys,
                       const std::string& more = "") {
    return R"({"zero_optimization": {"stage": )" + std::to_string(stage) +
           ", " + keys + "}" + more + "}";
  };
  expect_error(zero(2, R"("allgather_bucket_size": 501)"),
               "/allgather_bucket_size 501 with /zero_optimization/stage 2");
  EXPECT_EQ(error_of(zero(3, R"("allgather_bucket_size": 501)")), "");
  expect_error(zero(1, R"("compute_grad_norm": false)"),
               "/compute_grad_norm false with /zero_optimization/stage 1 and "
               "/gradient_clipping 1");
  EXPECT_EQ(error_of(zero(1, R"("compute_grad_norm": false)",
                          R"(, "gradient_clipping": 0)")),
            "");
  expect_error(zero(2, R"("offload_optimizer": {"ratio": 0.5})"),
               "/offload_optimizer/ratio: 0.5 with /zero_optimization/stage 2");
  const std::string sgd = R"(, "optimizer": {"type": "SGD"})";
  expect_error(zero(1, R"("reduce_scatter": true)", sgd),
               "/optimizer/type \"SGD\" with /zero_optimization/stage 1");
  EXPECT_EQ(error_of(zero(1, R"("reduce_scatter": true)",
                          sgd + R"(, "zero_allow_untested_optimizer": true)")),
            "");
  for (const int stage : {0, 1, 2, 3}) {
    const std::string error =
        error_of(zero(stage, R"("reduce_scatter": true)",
                      R"(, "bf16": {"enabled": true}, "data_types":
                      {"grad_accum_dtype": "fp32"})"));
    EXPECT_EQ(error.empty(), stage > 0) << error;
  }
  // No effect, and no error
  EXPECT_TRUE(remarks(parse(zero(1, R"("stage3_max_live_parameters": 1)",
                                 R"(, "prescale_gradients": true)")),
                      "/prescale_gradients: has no effect here"));
  EXPECT_TRUE(remarks(parse(R"({"prescale_gradients": true,
                      "gradient_predivide_factor": 2})"),
                      "/gradient_predivide_factor: has no effect here"));
  EXPECT_TRUE(remarks(parse(zero(3, R"("allgather_partitions": false)")),
                      "/allgather_partitions: has no effect here"));
}

std::size_t lines_of(const std::string& text) {
  return 1 +
         static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n'));
}

// --- All mistakes at once ----------------------------------------------------

TEST(EngineMistakes, AreNamedAllAtOnce) {
  const std::string error = error_of(
      R"({"train_batch_size": 0, "gradient_cliping": 1, "sparse_gradients":
          true, "bf16": {"enabled": true}, "fp16": {"enabled": true},
          "optimizer": {"type": "Adam", "params": {"lr": -1, "betas": [2, 3],
          "momentum": 0}}, "zero_optimization": {"stage": 9,
          "offload_optimizer": {"device": "cpu"}}})");
  for (const char* path :
       {"/train_batch_size: 0", "/gradient_cliping: unknown",
        "/sparse_gradients: DeepSpeed", "/bf16/enabled and /fp16/enabled",
        "/optimizer/params/lr: -1", "/optimizer/params/betas/0: 2",
        "/optimizer/params/betas/1: 3",
        "/optimizer/params/momentum: DeepSpeedCPUAdam",
        "/zero_optimization/stage: 9"}) {
    EXPECT_NE(error.find(std::string("ds.json: ") + path), std::string::npos)
        << path << "\n"
        << error;
  }
  // A section that is no object lacks no keys
  EXPECT_EQ(lines_of(error_of(R"({"scheduler": [], "optimizer": 1})")), 2U);
  // Keys that depend on an unreadable stage are not judged
  EXPECT_EQ(lines_of(error), 9U) << error;
  EXPECT_EQ(lines_of(error_of(R"({"zero_optimization": {"stge": 2,
                "offload_optimizer": {"device": "cpu"}}})")),
            1U);
}

TEST(EngineMistakes, OfVeryManyTheFirstAreNamed) {
  json file;
  for (int i = 0; i < 100; ++i) file["no_such_key_" + std::to_string(i)] = 1;
  const std::string error = error_of(file.dump());
  EXPECT_EQ(lines_of(error), 21U);
  EXPECT_NE(error.find("\nds.json: 80 more mistakes like these"),
            std::string::npos);
}

TEST(EngineMistakes, WhatIsPrintedIsReadAgain) {
  const DeepSpeedConfig config =
      parse(R"({"gradient_clipping": 0.5, "dump_state": true, "optimizer":
                {"type": "Adam"}, "data_types": {"grad_accum_dtype": "fp32"},
                "activation_checkpointing": {"cpu_checkpointing": true}})");
  const json printed = json::parse(config.explained());
  EXPECT_EQ(printed["_acts"],
            "/activation_checkpointing/cpu_checkpointing, "
            "/data_types/grad_accum_dtype, /gradient_clipping, "
            "/optimizer/type");
  EXPECT_EQ(printed["_remark 1"],
            "/dump_state: has no effect here: it is about DeepSpeed's log");
  EXPECT_EQ(parse(config.explained()).to_json(), config.to_json());
}

}  // namespace
}  // namespace shardbook::engine
