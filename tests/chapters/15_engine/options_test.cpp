// Options that a config fills, does not use, or contradicts.

#include <gtest/gtest.h>

#include <algorithm>

#include "chapters/15_engine/engine_strategy.h"
#include "tests/chapters/15_engine/choice_support.h"
#include "tests/chapters/15_engine/config_support.h"
#include "tests/support/errors.h"

namespace shardbook::engine {
namespace {

TEST(EngineOptions, TheConfigFillsThem) {
  Options options = options_for(2);
  const auto config = DeepSpeedConfig::parse(
      R"({"train_micro_batch_size_per_gpu": 3, "gradient_clipping": 0.25,
          "gradient_accumulation_steps": 2, "bf16": {"enabled": true},
          "optimizer": {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}},
          "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4,
            "warmup_type": "linear"}}})",
      "ds.json");
  options.dtype = DType::kF32;
  apply_config(config, 2, {}, options);
  EXPECT_EQ(options.batch, 12);
  EXPECT_EQ(options.optimizer, "sgd");
  EXPECT_EQ(options.optimizer_options.momentum, 0.9);
  EXPECT_EQ(options.clip, 0.25);
  EXPECT_EQ(options.dtype, DType::kBF16);
  // warmup_max_lr is the optimizer's rate
  EXPECT_EQ(options.rate(1), 0);
  EXPECT_EQ(options.rate(3), 0.25);
  EXPECT_EQ(options.rate(100), 0.5);
}

// --clip takes precedence over the key and its default.
TEST(EngineOptions, OneOfThreeClips) {
  const auto clip = [](const std::string& text, const Given& given) {
    Options options = options_for(2);
    options.clip = given.empty() ? 0 : 2;
    apply_config(DeepSpeedConfig::parse(text, "ds.json"), 2, given, options);
    return options.clip;
  };
  const Given two = {{"--clip", "2"}};
  EXPECT_EQ(clip("{}", {}), 1);
  EXPECT_EQ(clip("{}", two), 2);
  EXPECT_EQ(clip(R"({"gradient_clipping": 0.5})", {}), 0.5);
  EXPECT_EQ(clip(R"({"gradient_clipping": 0.5})", two), 2);
  EXPECT_EQ(clip(R"({"gradient_clipping": 0})", {}), 0);
}

// As in Hugging Face's Trainer; widths refer to the model of options_for.
TEST(EngineOptions, AutoIsFilledFromTheCommandLineAndTheModel) {
  Options options = options_for(2);
  options.batch = 12;
  options.steps = 7;
  options.warmup = 3;
  options.dtype = DType::kBF16;
  options.optimizer_options.lr = 0.25;
  options.optimizer_options.weight_decay = 0.5;
  const Given given = {{"--warmup", "3"}, {"--dtype", "bf16"}};
  const auto config = read_config(
      R"({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
          "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
          "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"},
          "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas":
            "auto", "eps": "auto", "weight_decay": "auto"}},
          "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr":
            "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto",
            "total_num_steps": "auto"}},
          "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto"}})",
      options, given);
  // The model has a width of 16
  expect_values(config, R"({"bf16": {"enabled": true},
      "fp16": {"enabled": false}, "gradient_clipping": 1,
      "optimizer": {"params": {"weight_decay": 0.5}},
      "scheduler": {"params": {"warmup_max_lr": 0.25, "warmup_num_steps": 3,
        "total_num_steps": 7}},
      "zero_optimization": {"reduce_bucket_size": 256,
        "stage3_prefetch_bucket_size": 230,
        "stage3_param_persistence_threshold": 160}})");
  for (const char* remark :
       {"/train_batch_size \"auto\": 12, from --batch",
        "/train_micro_batch_size_per_gpu \"auto\": 6, from the other sizes",
        "/gradient_accumulation_steps \"auto\": 1, from the Trainer's default",
        "/optimizer/params/lr \"auto\": 0.25, from --lr",
        "/optimizer/params/betas \"auto\": [0.9,0.999], from --beta1 and",
        "/scheduler/params/total_num_steps \"auto\": 7, from --steps",
        "/bf16/enabled \"auto\": true, from --dtype",
        "/gradient_clipping \"auto\": 1.0, from the Trainer's default"}) {
    EXPECT_EQ(std::count_if(config.remarks.begin(), config.remarks.end(),
                            [&](const std::string& each) {
                              return each.rfind(remark, 0) == 0;
                            }),
              1)
        << remark;
  }
  // The filled options agree with the config
  EXPECT_NO_THROW(apply_config(config, 2, given, options));
  EXPECT_EQ(options.batch, 12);
}

TEST(EngineOptions, SizesThatAreAutoFollowFromTheOthers) {
  const auto sizes = [](const std::string& keys, const Given& given = {}) {
    Options options = options_for(2);
    options.batch = 24;
    const auto config = read_config("{" + keys + "}", options, given);
    const BatchSizes all = resolve_batch(config.batch, 2);
    return std::vector<std::int64_t>{all.train, all.micro, all.accumulation};
  };
  using Sizes = std::vector<std::int64_t>;
  const std::string train = R"("train_batch_size": )",
                    micro = R"(, "train_micro_batch_size_per_gpu": )",
                    g = R"(, "gradient_accumulation_steps": )",
                    none = "\"auto\"";
  EXPECT_EQ(sizes(train + none + micro + none + g + "3"), (Sizes{24, 4, 3}));
  EXPECT_EQ(sizes(train + "16" + micro + none + g + none), (Sizes{16, 8, 1}));
  EXPECT_EQ(sizes(train + "16" + micro + "2" + g + none), (Sizes{16, 2, 4}));
  EXPECT_EQ(sizes(train + none + micro + "2" + g + "5"), (Sizes{20, 2, 5}));
}

// Zeros are the smallest limits, and recomputation changes no number.
TEST(EngineOptions, ZerosAndRecomputationTrainAsOneDevice) {
  for (const std::string keys :
       {R"("stage": 2, "reduce_bucket_size": 1, "allgather_bucket_size": 0)",
        R"("stage": 3, "sub_group_size": 0, "reduce_bucket_size": 1,
           "max_live_parameters": 0, "param_persistence_threshold": 0)"}) {
    const Report report = train_config(
        options_for(2),
        R"({"activation_checkpointing": {"cpu_checkpointing": true},
            "zero_optimization": {)" +
            keys + "}}");
    expect_claims(report);
    // Updates of single elements would take thousands of launches
    EXPECT_LT(report.time.step_s, 0.1);
  }
}

// --- Sums in f32, and Ulysses ------------------------------------------------

// Chapter 14 sums whole gradients in f32, chapter 03 a rank's shard of them.
TEST(EngineOptions, GradAccumDtypeIsFollowedOrRefused) {
  Options options = options_for(2);
  options.dtype = DType::kBF16;
  const auto chosen = [&](const std::string& dtype, int g, int stage = 1,
                          const std::string& more = "") {
    const auto config = DeepSpeedConfig::parse(
        R"({"gradient_accumulation_steps": )" + std::to_string(g) +
            R"(, "data_types": {"grad_accum_dtype": ")" + dtype +
            R"("}, "zero_optimization": {"stage": )" + std::to_string(stage) +
            "}" + more + "}",
        "ds.json");
    return choose(options, config).name;
  };
  EXPECT_EQ(chosen("fp32", 2), "hybrid");
  EXPECT_EQ(chosen("bf16", 2), "ZeRO-1");
  EXPECT_EQ(chosen("fp32", 2, 2), "ZeRO-2");
  EXPECT_EQ(chosen("fp32", 2, 3), "ZeRO-3");
  const auto error = [&](const std::string& dtype, int stage,
                         const std::string& more = "") -> std::string {
    return shardbook::error_of([&] { chosen(dtype, 2, stage, more); });
  };
  for (const char* more :
       {R"("tensor_parallel": {"mode": "1d", "size": 2})",
        R"("recompute": "attention")", R"("sharding": "fsdp")"}) {
    expect_text(
        error("fp32", 3, R"(, "shardbook": {)" + std::string(more) + "}"),
        {"/data_types/grad_accum_dtype \"fp32\" in bf16 "
         "with /zero_optimization/stage 3 and "});
  }
  expect_text(error("fp16", 1),
              {"/data_types/grad_accum_dtype \"fp16\" in bf16"});
}

// One device clips by the option, so the engine must as well.
TEST(EngineOptions, ClippingOfTheCommandLineHolds) {
  for (const char* stage : {"0", "1"}) {
    Options options = options_for(2);
    options.optimizer = "sgd";
    options.clip = 0.1;
    const auto config = DeepSpeedConfig::parse(
        R"({"zero_optimization": {"stage": )" + std::string(stage) + "}}",
        "ds.json");
    const Choice choice = choose(options, config);
    expect_claims(train_choice(options, choice));
    expect_text(describe(choice, config), {"gradient_clipping: 0.1, from "
                                           "--clip"});
    EXPECT_EQ(describe(choice, config).find("not given"), std::string::npos);
  }
}

TEST(EngineOptions, TheReportSaysWhichAdamRuns) {
  const auto config = DeepSpeedConfig::parse(
      R"({"optimizer": {"type": "Adam"}, "fp16": {"enabled": true}})",
      "ds.json");
  const Choice choice = choose(options_for(2), config);
  expect_text(describe(choice, config), {"this run uses AdamW"});
  expect_text(describe(choice, config), {"the loss scale begins at 2^16"});
}

// FSDP has limits of its own, so some of stage 3's keys have no effect.
TEST(EngineOptions, KeysWithoutEffectAreNamed) {
  const auto described = [](const std::string& sharding) {
    const auto config = DeepSpeedConfig::parse(
        R"({"zero_optimization": {"stage": 3, "stage3_max_reuse_distance": 0,
            "sub_group_size": 100}, "shardbook": {"sharding": ")" +
            sharding + "\"}}",
        "ds.json");
    return describe(choose(options_for(2), config), config);
  };
  EXPECT_EQ(described("zero").find("without effect"), std::string::npos);
  expect_text(described("fsdp"), {"stage3_max_reuse_distance, sub_group_size: "
                                  "without effect in FSDP"});
}

TEST(EngineOptions, AConflictNamesOptionAndKey) {
  const auto error = [](const std::string& flag, const std::string& value,
                        const std::string& text) -> std::string {
    Options options = options_for(2);
    options.batch = 8;
    options.optimizer_options.lr = 0.5;
    options.clip = 2;
    return shardbook::error_of([&] {
      apply_config(DeepSpeedConfig::parse(text, "ds.json"), 2, {{flag, value}},
                   options);
    });
  };
  EXPECT_EQ(error("--batch", "8", R"({"train_batch_size": 12})"),
            "--batch 8: ds.json has /train_batch_size 12; leave one of them "
            "out");
  EXPECT_EQ(error("--batch", "8", R"({"train_batch_size": 8})"), "");
  const std::string adam =
      R"({"optimizer": {"type": "Adam", "params": {"lr": 0.1}}})";
  EXPECT_EQ(error("--lr", "0.5", adam),
            "--lr 0.5: ds.json has /optimizer/params/lr 0.1; leave one of them "
            "out");
  expect_text(
      error("--optimizer", "adamw", R"({"optimizer": {"type": "SGD"}})"),
      {"/optimizer/type"});
  expect_text(error("--dtype", "f64", R"({"fp16": {"enabled": true}})"),
              {"/fp16/enabled"});
  expect_text(error("--warmup", "3",
                    R"({"scheduler": {"type": "WarmupLR", "params": {}}})"),
              {"/scheduler/type WarmupLR"});
}

}  // namespace
}  // namespace shardbook::engine
