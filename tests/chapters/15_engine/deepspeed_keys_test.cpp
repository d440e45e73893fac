// Every key of DeepSpeed acts, or a message names it; defaults.

#include "chapters/15_engine/internal/deepspeed_keys.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "tests/chapters/15_engine/engine_support.h"

namespace shardbook::engine {
namespace {

using internal::Effect;
using internal::KnownKeys;
using nlohmann::json;

/// A file with this value at a path.
std::string file_with(const std::string& path, const json& value) {
  json file = json::object();
  file[json::json_pointer(path)] = value;
  return file.dump();
}

template <typename Check>
void for_each_key(Effect effect, const Check& check) {
  for (const KnownKeys& row : internal::known_keys()) {
    for (const internal::KnownKey& key : internal::keys_of(row)) {
      if (row.effect == effect)
        check(row, std::string(row.section) + "/" + key.name);
    }
  }
}

constexpr Effect kEffects[] = {Effect::kActs, Effect::kNone, Effect::kChanges,
                               Effect::kInside, Effect::kGone};

TEST(EngineKeys, NoneIsInTheTableTwice) {
  std::set<std::string> all;
  for (const Effect effect : kEffects) {
    for_each_key(effect, [&](const KnownKeys&, const std::string& path) {
      EXPECT_TRUE(all.insert(path).second) << path;
    });
  }
}

// A value of no possible type is an error of a parameter that its class has;
// EngineConfigFuzz has the other keys.
TEST(EngineKeys, ParametersThatActAreRead) {
  const auto expect_read = [](const std::string& section,
                              const std::string& type, const std::string& own) {
    for_each_key(
        Effect::kActs, [&](const KnownKeys& row, const std::string& path) {
          if (row.section != section + "/params") return;
          json file;
          file[json::json_pointer(section + "/type")] = type;
          file[json::json_pointer(path)] = json::array({"x"});
          const std::string error = error_of(file.dump());
          EXPECT_NE(error.find(path + ": "), std::string::npos) << error;
          const std::string key = path.substr(path.rfind('/') + 1);
          EXPECT_EQ(error.find("no such parameter") == std::string::npos,
                    own.find(" " + key + " ") != std::string::npos)
              << type << " " << error;
        });
  };
  const std::string adam = " lr weight_decay betas eps adam_w_mode torch_adam ";
  expect_read("/optimizer", "Adam", adam);
  expect_read("/optimizer", "AdamW", adam);
  expect_read("/optimizer", "SGD",
              " lr weight_decay momentum dampening nesterov ");
  const std::string warmup =
      " warmup_min_lr warmup_max_lr warmup_num_steps warmup_type ";
  expect_read("/scheduler", "WarmupLR", warmup);
  expect_read("/scheduler", "WarmupDecayLR", warmup + "total_num_steps ");
}

TEST(EngineKeys, OneRemarkNamesAKeyWithoutEffect) {
  for_each_key(Effect::kNone, [](const KnownKeys& row,
                                 const std::string& path) {
    EXPECT_FALSE(std::string(row.why).empty()) << path;
    // Parameters depend on the class: below
    if (path.find("/params/") != std::string::npos) return;
    json file;
    for (const json& value : {json(true), json("info"), json::object(),
                              json::array(), json(1), json("torch")}) {
      file = json::parse(file_with(path, value));
      if (path.rfind("/optimizer/", 0) == 0) {
        file["optimizer"]["type"] = "AdamW";
      }
      if (error_of(file.dump()).empty()) break;
    }
    const auto all = parse(file.dump()).remarks;
    EXPECT_EQ(std::count_if(all.begin(), all.end(),
                            [&](const std::string& remark) {
                              return remark.rfind(path + ": has no effect here",
                                                  0) == 0;
                            }),
              1)
        << path;
  });
}

TEST(EngineKeys, ThoseThatWouldChangeNumbersAreRefusedUnlessHarmless) {
  for_each_key(Effect::kChanges, [](const KnownKeys& row,
                                    const std::string& path) {
    EXPECT_FALSE(std::string(row.why).empty()) << path;
    json file = json::parse(file_with(path, "other"));
    const auto in_type = [&](const char* section, const char* type) {
      if (path.rfind(section, 0) != 0) return;
      file[json::json_pointer(std::string(section) + "/type")] = type;
    };
    in_type("/optimizer", "AdamW");
    in_type("/scheduler", "WarmupLR");
    const bool is_torchs = path == "/optimizer/params/maximize" ||
                           path == "/optimizer/params/differentiable" ||
                           path == "/optimizer/params/decoupled_weight_decay";
    if (is_torchs) {
      file["optimizer"]["type"] = "Adam";
      file["optimizer"]["params"]["torch_adam"] = true;
      file["optimizer"]["params"]["adam_w_mode"] = false;
    }
    EXPECT_NE(error_of(file.dump())
                  .find(path + ": \"other\" is not offered: " + row.why),
              std::string::npos)
        << path;
    const std::string harmless = row.harmless;
    if (harmless.empty()) return;
    file[json::json_pointer(path)] =
        harmless == "off" ? json{{"enabled", false}} : json::parse(harmless);
    EXPECT_TRUE(remarks(parse(file.dump()), path + ": has no effect here"))
        << path;
  });
  expect_error(R"({"data_efficiency": {"data_sampling": {"enabled": 1}}})",
               "/data_efficiency: is not offered: other samples");
}

// DeepSpeed 0.19.8 raises DeepSpeedConfigError, or pydantic's ValidationError.
TEST(EngineKeys, ThoseThatDeepSpeedHasDroppedAreRefusedWithAnyValue) {
  int count = 0;
  for_each_key(Effect::kGone, [&](const KnownKeys& row,
                                  const std::string& path) {
    count += 1;
    for (const json& value :
         {json(false), json(nullptr), json::object(), json("auto"), json(-1)}) {
      EXPECT_NE(
          error_of(file_with(path, value))
              .find(path + ": DeepSpeed 0.19.8 refuses this key: " + row.why),
          std::string::npos)
          << path << " " << value;
    }
  });
  EXPECT_EQ(count, 19);
}

// What DeepSpeed 0.19.8 makes of them: TypeError where the class has no such
// parameter.
TEST(EngineKeys, ParametersAreThoseOfTheClassThatDeepSpeedCreates) {
  const std::string offload = R"(, "zero_optimization": {"stage": 2,
      "offload_optimizer": {"device": "cpu"}})";
  const auto expect = [](const std::string& type, const std::string& params,
                         const std::string& more, const std::string& refused) {
    const std::string text = "{\"optimizer\": {\"type\": \"" + type +
                             "\", \"params\": {" + params + "}}" + more + "}";
    if (refused.empty()) {
      EXPECT_EQ(error_of(text), "") << text;
    } else {
      expect_error(text, refused);
    }
  };
  const std::string torch = R"("torch_adam": true, )";
  for (const char* key : {"fused", "foreach", "capturable"}) {
    const std::string param = std::string("\"") + key + "\": true";
    const std::string path = std::string("/optimizer/params/") + key + ": ";
    expect("Adam", param, "", path + "FusedAdam, which DeepSpeed creates for");
    expect("AdamW", torch + param, "", "");
  }
  expect("AdamW", R"("set_grad_none": true)", "", "");
  expect("AdamW", torch + R"("set_grad_none": true)", "", "PyTorch's AdamW");
  expect("AdamW", R"("set_grad_none": true)", offload, "DeepSpeedCPUAdam");
  expect("AdamW", R"("bias_correction": true)", "", "");
  expect("Adam", torch + R"("adam_w_mode": false, "bias_correction": true)", "",
         "PyTorch's Adam, ");
  expect("SGD", R"("fused": true)", "", "");
  expect("SGD", R"("amsgrad": false)", "", "PyTorch's SGD");
  expect("AdamW", R"("freeze_step": 1)", "", "/freeze_step: FusedAdam");
  expect_error(R"({"scheduler": {"type": "WarmupLR", "params":
                   {"cycle_max_lr": 1}}})",
               "/scheduler/params/cycle_max_lr: WarmupLR, which");
  expect_error(R"({"scheduler": {"type": "WarmupLR"}})",
               "/scheduler/params: missing; DeepSpeed's WarmupLR needs it");
  EXPECT_EQ(error_of(R"({"optimizer": {"type": "AdamW", "params": null}})"),
            "");
}

TEST(EngineKeys, OtherOptimizersAndSchedulesAreKnown) {
  const auto expect_why = [](const char* section, const char* type,
                             const std::string& why) {
    expect_error(std::string("{\"") + section + "\": {\"type\": \"" + type +
                     "\", \"params\": {}}}",
                 std::string("/type: \"") + type + "\" " + why);
  };
  expect_why("optimizer", "Muon", "is DeepSpeed's, but not offered");
  expect_why("optimizer", "RMSprop", "is PyTorch's, but not offered");
  expect_why("optimizer", "OneBitAdam", "is not DeepSpeed's any more");
  expect_why("optimizer", "Adan", "is unknown; give Adam, AdamW or SGD");
  expect_why("scheduler", "OneCycle", "is DeepSpeed's, but not offered");
  expect_why("scheduler", "CosineAnnealingLR", "is PyTorch's, but not offered");
}

TEST(EngineKeys, NamesInSectionsWithoutEffectAreKnownToo) {
  expect_error(R"({"zero_optimization": {"offload_param": {"divice": "cpu"}}})",
               "/zero_optimization/offload_param/divice: unknown key; did you "
               "mean \"device\"?");
}

// A guess corrects the key's spelling, never its meaning.
TEST(EngineKeys, ALetterThatIsMissingIsFound) {
  std::set<std::string> known;
  for (const Effect effect : kEffects) {
    if (effect == Effect::kGone) continue;
    for_each_key(effect, [&](const KnownKeys&, const std::string& path) {
      known.insert(path);
    });
  }
  for (const std::string& path : known) {
    const std::size_t begin = path.rfind('/') + 1;
    if (path.size() - begin < 5) continue;
    std::string misspelt = path;
    misspelt.erase((begin + path.size()) / 2, 1);
    if (known.count(misspelt) > 0) continue;
    EXPECT_NE(error_of(file_with(misspelt, 1))
                  .find(misspelt + ": unknown key; did you mean \"" +
                        path.substr(begin) + "\"?"),
              std::string::npos)
        << path << "\n"
        << error_of(file_with(misspelt, 1));
  }
}

TEST(EngineKeys, AMisplacedKeyIsSentToItsSection) {
  expect_error(R"({"stage": 2})",
               "/stage: unknown key; it belongs to "
               "/zero_optimization/stage");
  expect_error(R"({"zero_optimization": {"lr": 1}})",
               "it belongs to /optimizer/params/lr");
  expect_error(R"({"pipeline": {"stage": 2}})", "did you mean \"stages\"?");
  expect_error(R"({"gradient": 2})",
               "/gradient: unknown key; DeepSpeed has no such key");
  expect_error(R"({"comment": 2, "log": 2})",
               "/comment: unknown key; DeepSpeed has no such key\nds.json: "
               "/log: unknown key; DeepSpeed has no such key");
  expect_error(R"({"grad_clipping": 2})", "did you mean \"gradient_clipping\"");
}

// --- Defaults that changed, and remarks --------------------------------------

TEST(EngineDefaults, AdamIsAdamWUnlessToldOtherwise) {
  const std::string adam = R"({"optimizer": {"type": "Adam", "params": {)";
  EXPECT_EQ(parse(adam + "}}}").optimizer.name(), "adamw");
  EXPECT_TRUE(remarks(parse(adam + "}}}"), "this run uses AdamW"));
  const DeepSpeedConfig l2 = parse(adam + R"("adam_w_mode": false}}})");
  EXPECT_EQ(l2.optimizer.name(), "adam");
  EXPECT_TRUE(remarks(l2, "adds weight decay to the gradient"));
  const DeepSpeedConfig adamw = parse(
      R"({"optimizer": {"type": "AdamW", "params": {"adam_w_mode": false}}})");
  EXPECT_EQ(adamw.optimizer.name(), "adamw");
  EXPECT_TRUE(remarks(adamw, "adam_w_mode: has no effect here"));
}

TEST(EngineDefaults, RemarksSayWhatOtherVersionsDo) {
  EXPECT_TRUE(remarks(parse("{}"), "gradient_clipping is not given: 1.0"));
  EXPECT_FALSE(
      remarks(parse(R"({"gradient_clipping": 0})"), "gradient_clipping"));
  EXPECT_EQ(parse(R"({"gradient_clipping": 0})").gradient_clipping, 0);
  EXPECT_TRUE(
      remarks(parse(R"({"scheduler": {"type": "WarmupLR", "params": {}}})"),
              "warmup_max_lr"));
  EXPECT_TRUE(remarks(parse(R"({"fp16": {"enabled": true}})"),
                      "doubles after 1001 good steps, then after 1000 each"));
  EXPECT_TRUE(remarks(parse(R"({"pipeline": {"stages": 2},
                       "zero_optimization": {"overlap_comm": true}})"),
                      "overlap_comm: off"));
  EXPECT_TRUE(remarks(parse(R"({"zero_optimization": {"stage": 2,
                       "contiguous_gradients": false}})"),
                      "contiguous_gradients false"));
  EXPECT_FALSE(
      remarks(parse(R"({"zero_optimization": {"stage": 2}})"), "contiguous"));
  EXPECT_TRUE(
      remarks(parse(R"({"zero_optimization": {"stage": 2, "offload_optimizer":
                       {"device": "cpu", "pin_memory": true}}})"),
              "pin_memory: "));
}

// torch.optim.AdamW decays by 0.01, FusedAdam by 0 (DeepSpeed 0.19.8).
TEST(EngineDefaults, TorchAdamDecaysUnlessToldOtherwise) {
  const auto decay = [](const std::string& type, const std::string& params) {
    return parse("{\"optimizer\": {\"type\": \"" + type + "\", \"params\": {" +
                 params + "}}}")
        .optimizer.params.weight_decay;
  };
  for (const std::string type : {"Adam", "AdamW"}) {
    EXPECT_EQ(decay(type, ""), 0);
    EXPECT_EQ(decay(type, R"("torch_adam": false)"), 0);
    EXPECT_EQ(decay(type, R"("torch_adam": true)"), 0.01);
    EXPECT_EQ(decay(type, R"("torch_adam": true, "weight_decay": 0)"), 0);
  }
  EXPECT_EQ(decay("Adam", R"("torch_adam": true, "adam_w_mode": false)"), 0);
  EXPECT_TRUE(remarks(parse(R"({"optimizer": {"type": "Adam", "params":
                      {"torch_adam": true}}})"),
                      "torch_adam without weight_decay: 0.01"));
}

// The section asks for recomputation if a key makes sense only with it.
TEST(EngineDefaults, ActivationCheckpointingAsksForRecomputation) {
  const auto recompute = [](const std::string& section,
                            const std::string& more = "") {
    return parse("{\"activation_checkpointing\": " + section + more + "}")
        .recompute();
  };
  EXPECT_EQ(recompute("{}"), "never");
  EXPECT_EQ(recompute(R"({"partition_activations": false, "profile": true,
                          "number_checkpoints": null})"),
            "never");
  EXPECT_EQ(recompute(R"({"partition_activations": true})"), "blocks");
  EXPECT_EQ(recompute(R"({"cpu_checkpointing": true})"), "blocks");
  EXPECT_EQ(recompute(R"({"number_checkpoints": 4})"), "blocks");
  const std::string asks = R"({"partition_activations": true})";
  EXPECT_EQ(recompute(asks, R"(, "pipeline": {"stages": 2})"), "never");
  EXPECT_EQ(recompute(asks, R"(, "shardbook": {"recompute": "attention"})"),
            "attention");
  for (const char* section : {"{}", R"({"partition_activations": false})"}) {
    EXPECT_TRUE(remarks(
        parse("{\"activation_checkpointing\": " + std::string(section) + "}"),
        "/activation_checkpointing: has no effect here"));
  }
}

TEST(EngineDefaults, UlyssesByDeepSpeedsName) {
  const auto degrees = parse(R"({"sequence_parallel_size": 2})").degrees;
  EXPECT_EQ(degrees.cp, 2);
  EXPECT_EQ(degrees.cp_kind, "ulysses");
  expect_error(R"({"sequence_parallel_size": 2, "shardbook":
                   {"context_parallel": {"size": 2}}})",
               "/shardbook/context_parallel: /sequence_parallel_size is in the "
               "file as well");
}

// DeepSpeed's classes drop "auto", so its default holds.
TEST(EngineDefaults, AutoThatNobodyFills) {
  const DeepSpeedConfig config =
      parse(R"({"zero_optimization": {"stage": 3, "overlap_comm": "auto",
                "reduce_bucket_size": "auto", "max_live_parameters": "auto"},
                "fp16": {"enabled": "auto"}, "pipeline": {"stages": "auto"}})");
  EXPECT_TRUE(config.overlaps());
  EXPECT_TRUE(remarks(config,
                      "/zero_optimization/reduce_bucket_size \"auto\": "
                      "500000000, DeepSpeed's default"));
  EXPECT_TRUE(remarks(config, "/fp16/enabled \"auto\": false, DeepSpeed's"));
  EXPECT_TRUE(remarks(config, "/pipeline/stages \"auto\": 1, DeepSpeed's"));
  expect_error(R"({"steps_per_print": "auto"})",
               "/steps_per_print: \"auto\" is for front ends");
}

TEST(EngineDefaults, FrontEndsFillAuto) {
  const std::string text =
      R"({"train_batch_size": "auto", # the script's
          "gradient_accumulation_steps": "auto", "optimizer": {"type": "AdamW",
          "params": {"lr": "auto", "eps": 0.5}}})";
  expect_error(text, "ds.json: /optimizer/params/lr: \"auto\" is for front");
  const FilledConfig filled = fill_auto(
      text, "ds.json",
      {{"/train_batch_size", {"32", "--batch"}},
       {"/gradient_accumulation_steps", {}},  // goes
       {"/optimizer/params/lr", {"0.25", "--lr"}},
       {"/optimizer/params/eps", {"1", "--eps"}},  // not "auto": stays
       {"/gradient_clipping", {"2", "--clip"}}});  // absent: stays so
  const DeepSpeedConfig config = parse(filled.text);
  EXPECT_EQ(config.batch.train, 32);
  EXPECT_EQ(config.batch.accumulation, 0);
  EXPECT_EQ(config.optimizer.params.lr, 0.25);
  EXPECT_EQ(config.optimizer.params.eps, 0.5);
  EXPECT_EQ(config.gradient_clipping, 1);
  EXPECT_EQ(filled.remarks,
            (std::vector<std::string>{
                "/optimizer/params/lr \"auto\": 0.25, from --lr",
                "/train_batch_size \"auto\": 32, from --batch"}));
}

}  // namespace
}  // namespace shardbook::engine
