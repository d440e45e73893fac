// What a config fills in, what it does not use, and what it contradicts.

#include <gtest/gtest.h>

#include "chapters/15_engine/trainer.h"
#include "tests/chapters/15_engine/choice_support.h"

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

// The one device clips by the option, so the engine has to as well.
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
    EXPECT_EQ(describe(choice, config).find("gradient_clipping"),
              std::string::npos);
  }
}

TEST(EngineOptions, TheReportSaysWhichAdamRuns) {
  const auto config = DeepSpeedConfig::parse(
      R"({"optimizer": {"type": "Adam"}, "fp16": {"enabled": true}})",
      "ds.json");
  const Choice choice = choose(options_for(2), config);
  EXPECT_NE(describe(choice, config).find("adds weight decay to the gradient"),
            std::string::npos);
  EXPECT_NE(describe(choice, config).find("the loss scale begins at 2^16"),
            std::string::npos);
}

// Stage 3 by FSDP has limits of its own, so a config says more than it does.
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
  EXPECT_NE(described("fsdp").find("stage3_max_reuse_distance, sub_group_size: "
                                   "without effect in FSDP"),
            std::string::npos);
}

TEST(EngineOptions, AConflictNamesOptionAndKey) {
  const auto error = [](const std::string& flag, const std::string& value,
                        const std::string& text) -> std::string {
    Options options = options_for(2);
    options.batch = 8;
    options.optimizer_options.lr = 0.5;
    options.clip = 2;
    try {
      apply_config(DeepSpeedConfig::parse(text, "ds.json"), 2, {{flag, value}},
                   options);
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_EQ(error("--batch", "8", R"({"train_batch_size": 12})"),
            "--batch 8: ds.json has /train_batch_size 12; leave one of them "
            "out");
  EXPECT_EQ(error("--batch", "8", R"({"train_batch_size": 8})"), "no error");
  const std::string adam =
      R"({"optimizer": {"type": "Adam", "params": {"lr": 0.1}}})";
  EXPECT_EQ(error("--lr", "0.5", adam),
            "--lr 0.5: ds.json has /optimizer/params/lr 0.1; leave one of them "
            "out");
  EXPECT_NE(error("--optimizer", "adamw", adam).find("/optimizer/type"),
            std::string::npos);
  EXPECT_NE(error("--clip", "2", R"({"gradient_clipping": 1})")
                .find("/gradient_clipping 1"),
            std::string::npos);
  EXPECT_NE(error("--dtype", "f64", R"({"fp16": {"enabled": true}})")
                .find("/fp16/enabled"),
            std::string::npos);
  EXPECT_NE(error("--warmup", "3", R"({"scheduler": {"type": "WarmupLR"}})")
                .find("/scheduler/type WarmupLR"),
            std::string::npos);
}

}  // namespace
}  // namespace shardbook::engine
