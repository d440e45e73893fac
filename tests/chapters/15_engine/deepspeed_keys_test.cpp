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
    std::istringstream keys(row.keys);
    for (std::string key; keys >> key;) {
      if (row.effect == effect)
        check(row, std::string(row.section) + "/" + key);
    }
  }
}

TEST(EngineKeys, NoneIsInTheTableTwice) {
  std::set<std::string> all;
  for (const Effect effect :
       {Effect::kActs, Effect::kNone, Effect::kChanges, Effect::kInside}) {
    for_each_key(effect, [&](const KnownKeys&, const std::string& path) {
      EXPECT_TRUE(all.insert(path).second) << path;
    });
  }
}

// A key with an effect is read: a value of no possible type is an error.
TEST(EngineKeys, ThoseThatActAreRead) {
  for_each_key(Effect::kActs, [](const KnownKeys&, const std::string& path) {
    if (path.rfind("/optimizer/params/", 0) == 0 ||
        path.rfind("/scheduler/params/", 0) == 0) {
      return;  // below
    }
    EXPECT_NE(error_of(file_with(path, json::array({"x"}))).find(path + ": "),
              std::string::npos)
        << path;
  });
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
  const std::string adam = " lr weight_decay betas eps adam_w_mode ";
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
    json file = json::parse(file_with(path, true));
    if (path.rfind("/optimizer/", 0) == 0) file["optimizer"]["type"] = "AdamW";
    if (path.rfind("/scheduler/", 0) == 0) {
      file["scheduler"]["type"] = "WarmupLR";
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
  expect_error(R"({"compression_training": {"weight_quantization":
                   {"shared_parameters": {"enabled": true}}}})",
               "/compression_training: is not offered: compressed weights");
  expect_error(R"({"elasticity": {"enabled": true}})",
               "/elasticity: is not offered: it takes the batch");
}

TEST(EngineKeys, NamesInSectionsWithoutEffectAreKnownToo) {
  expect_error(R"({"tensorboard": {"output_pth": "x"}})",
               "/tensorboard/output_pth: unknown key; did you mean "
               "\"output_path\"?");
  expect_error(R"({"zero_optimization": {"offload_param": {"divice": "cpu"}}})",
               "/zero_optimization/offload_param/divice: unknown key; did you "
               "mean \"device\"?");
}

// A guess corrects the key's spelling, never its meaning.
TEST(EngineKeys, ALetterThatIsMissingIsFound) {
  std::set<std::string> known;
  for (const Effect effect :
       {Effect::kActs, Effect::kNone, Effect::kChanges, Effect::kInside}) {
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
  EXPECT_TRUE(remarks(parse(R"({"scheduler": {"type": "WarmupLR"}})"),
                      "warmup_max_lr"));
  EXPECT_TRUE(
      remarks(parse(R"({"fp16": {"enabled": true}})"), "one step later"));
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
  const BookConfig book = parse(R"({"sequence_parallel_size": 2})").book;
  EXPECT_EQ(book.context_parallel, 2);
  EXPECT_EQ(book.context_parallel_kind, "ulysses");
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
  EXPECT_TRUE(config.zero.overlaps());
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
