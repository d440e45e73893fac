// ./shardbook plan with a model alone: what is printed, and when.

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "chapters/common/models/models.h"
#include "chapters/common/run/kept.h"
#include "chapters/planner/answer.h"
#include "tests/support/errors.h"

namespace shardbook::planner {
namespace {

using nlohmann::json;

/// With spaces where lines end.
std::string printed(std::vector<std::string> words) {
  words.insert(words.begin(), "plan");
  CommandLine line(words);
  std::string text = answer(line, confirm).text;
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

json counted(std::vector<std::string> words) {
  words.insert(words.end(), {"--format", "json"});
  return json::parse(printed(words));
}

TEST(PlannerCount, AModelAloneIsCounted) {
  const std::string text =
      printed({"--model", "mixtral-8x7b", "--seq", "4096"});
  expect_text(text, {"mixtral-8x7b, a mixtral: 46.70 billion parameters",
                     "experts    45,097,156,608  96.6 %", "12.88 billion act",
                     "samples of 4096 tokens", "PyTorch's FlopCounterMode",
                     "27.645 GFLOP  55.289 GFLOP  82.934 GFLOP",
                     "131.1 kB for each token, 536.9 MB for 4096 tokens",
                     "parameters 93.4 GB", "Activations are not known"});
  EXPECT_FALSE(has_text(text, "Note"));
}

TEST(PlannerCount, JsonHasTheSameNumbers) {
  const json llama = counted({"--model", "llama-2-7b", "--seq", "2048"});
  EXPECT_EQ(llama.at("parameters"), 6738415616);
  EXPECT_EQ(llama.at("parameters_active"), 6738415616);
  EXPECT_EQ(llama.at("parts").at("mlp"), 4328521728);
  const json& flops = llama.at("flops_per_token");
  // By hand: 6,607,077,376 weights multiply, and 32 layers attend
  const std::int64_t weights = 2147483648LL + 4328521728 + 131072000;
  const std::int64_t seen = 4 * 32 * 4096LL;
  EXPECT_EQ(flops.at("pytorch").at("forward"), 2 * weights + seen * 2048);
  EXPECT_EQ(flops.at("masked").at("forward"), 2 * weights + seen * 2049 / 2);
  for (const char* who : {"pytorch", "masked"}) {
    EXPECT_EQ(flops.at(who).at("backward"),
              2 * flops.at(who).at("forward").get<std::int64_t>());
    EXPECT_EQ(flops.at(who).at("both"),
              3 * flops.at(who).at("forward").get<std::int64_t>());
  }
  const json& memory = llama.at("memory_bytes");
  EXPECT_EQ(memory.at("dtype"), "bf16");
  EXPECT_EQ(memory.at("optimizer"), 12 * 6738415616);
  KeptSizes one;
  one.rows = 1;
  one.tokens = 2048;
  one.element = 2;
  EXPECT_EQ(memory.at("activations"),
            kept_by_model(ModelConfig::read("llama-2-7b"), one));
  EXPECT_EQ(llama.at("remarks"), json::array());
}

TEST(PlannerCount, WhatIsNotTrainedIsCountedAndSaysSo) {
  const std::string config = R"({"model_type": "deepseek_v3"})";
  expect_text(printed({"--model", config}),
              {"this config, a deepseek_v3: 671.03 billion", "shared experts",
               "as latents", "70.3 kB for each token",
               "does not train this model", "Note: the book does not train"});
  const json deepseek = counted({"--model", config});
  EXPECT_TRUE(deepseek.at("memory_bytes").at("activations").is_null());
  EXPECT_FALSE(deepseek.at("is_trained"));
  EXPECT_EQ(deepseek.at("seq"), 4096);  // the class's positions
  EXPECT_EQ(deepseek.at("kv_bytes").at("latent_per_token"), 70272);
}

TEST(PlannerCount, DevicesAndOptionsOfPlansAskForAPlan) {
  for (const std::vector<std::string>& words :
       std::vector<std::vector<std::string>>{
           {"--model", "llama-nano", "--top", "3"},
           {"--model", "llama-nano", "--batch", "8"},
           {"--seq", "64"}}) {
    expect_error([&] { printed(words); }, {"--nodes", "--world-size"});
  }
  expect_error(
      [] {
        printed({"--model", "llama-nano", "--seq", "257"});
      },
      {"--seq 257", "256 positions", "give 1 to 256"});
  expect_error(
      [] {
        printed({"--model", "resnet50"});
      },
      {"a resnet is not counted"});
}

}  // namespace
}  // namespace shardbook::planner
