// Plans of models that the book counts and does not train.

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "chapters/planner/answer.h"
#include "tests/chapters/common/llama_support.h"
#include "tests/support/errors.h"

namespace shardbook::planner {
namespace {

using common_test::golden_json;
using nlohmann::json;

std::string config_of(const std::string& file, const std::string& name) {
  return golden_json(file).at("models").at(name).at("config").dump();
}

std::string released(const std::string& name) {
  return config_of("released_models.json", name);
}

/// With spaces where lines end.
std::string planned(const std::string& model, std::vector<std::string> words) {
  words.insert(words.begin(), {"plan", "--model", model});
  CommandLine line(words);
  std::string text = answer(line, confirm).text;
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

std::string remarks_of(const StandIn& stand_in) {
  std::string all;
  for (const std::string& remark : stand_in.remarks) all += remark + "\n";
  return all;
}

// By hand from the released sizes: a plain MLP of width f becomes a gated one of 2
// f / 3, in pieces of 64 where that is no integer
TEST(PlannerStandIn, HasTheModelsMatrices) {
  struct Row {
    const char *name, *type;
    int hidden, heads, kv_heads, head_dim, width;
    bool is_tied;
  };
  for (const Row& row : std::vector<Row>{
           {"gemma-2-2b", "llama", 2304, 8, 4, 256, 9216, true},
           {"phi-3-mini", "llama", 3072, 32, 32, 96, 8192, false},
           {"olmo-2-7b", "llama", 4096, 32, 32, 128, 11008, false},
           {"starcoder2-3b", "llama", 3072, 24, 2, 128, 8192, true},
           {"falcon-7b", "llama", 4544, 71, 1, 64, 12096, true},
           {"pythia-160m", "llama", 768, 12, 12, 64, 2048, false},
           {"opt-6.7b", "llama", 4096, 32, 32, 128, 10944, true},
           {"bloom-7b1", "llama", 4096, 32, 32, 128, 10944, true},
           {"gpt-oss-20b", "mixtral", 2880, 64, 8, 64, 2880, false}}) {
    SCOPED_TRACE(row.name);
    const StandIn stand_in = stand_in_of(released(row.name), 2048);
    const ModelConfig& config = *stand_in.config;
    EXPECT_EQ(config.type, row.type);
    EXPECT_EQ(config.n_embd, row.hidden);
    EXPECT_EQ(config.n_head, row.heads);
    EXPECT_EQ(config.llama.kv_heads, row.kv_heads);
    EXPECT_EQ(config.llama.head_dim, row.head_dim);
    EXPECT_EQ(config.llama.intermediate_size, row.width);
    EXPECT_EQ(config.llama.tied, row.is_tied);
    EXPECT_EQ(config.llama.sliding_window, 0);
    const auto parameters = golden_json("released_models.json")
                                .at("models")
                                .at(row.name)
                                .at("parameters")
                                .get<double>();
    EXPECT_NEAR(static_cast<double>(num_parameters(config)) / parameters, 1,
                0.003);
    expect_text(remarks_of(stand_in), {"it is planned as a ", row.type});
  }
  const StandIn experts = stand_in_of(released("gpt-oss-20b"), 2048);
  const LlamaConfig& llama = experts.config->llama;
  EXPECT_EQ(llama.num_experts, 32);
  EXPECT_EQ(llama.experts_per_token, 4);
}

TEST(PlannerStandIn, SaysByHowMuchItDiffers) {
  // 80 heads of 128, and a hidden size that is no multiple of them
  expect_text(remarks_of(stand_in_of(R"({"model_type": "seed_oss"})", 2048)),
              {"as a mistral", "parameters +0.00 %"});
  // A gate of 2048 weights in each layer, for the shared expert
  expect_text(remarks_of(stand_in_of(released("qwen1.5-moe-a2.7b"), 2048)),
              {"by the table of a block", "parameters +0.00 %"});
  expect_text(remarks_of(stand_in_of(released("falcon-7b"), 2048)),
              {"parameters -0.13 %, operations per token -0.12 %"});
  expect_text(remarks_of(stand_in_of(config_of("whole_configs.json",
                                               "devstral-small-2-24b-instruct"),
                                     2048)),
              {"text model alone", "as a llama", "parameters +0.00 %"});
}

TEST(PlannerStandIn, IsRefusedByThePartThatDiffersMost) {
  // Indexers score all tokens
  expect_error([] { stand_in_of(R"({"model_type": "deepseek_v32"})", 4096); },
               {"nor can it be planned by the table of a block, which differs",
                "most in latent attention: 12.26 billion active parameters "
                "here, 11.41"});
  // Every second layer sees a second embedding
  expect_error([] { stand_in_of(R"({"model_type": "gemma4_text"})", 2048); },
               {"does not train a gemma4_text", "--model alone"});
}

TEST(PlannerStandIn, WindowsBelowTheSequenceAreNotUsed) {
  EXPECT_FALSE(has_text(remarks_of(stand_in_of(released("gemma-2-2b"), 4096)),
                        "windows"));
  expect_text(remarks_of(stand_in_of(released("gemma-2-2b"), 8192)),
              {"windows below 8192 tokens are not used", "planned as full"});
  // A model that trains on shorter samples
  EXPECT_EQ(stand_in_of("mistral-7b", 4096).config, nullptr);
  const StandIn mistral = stand_in_of("mistral-7b", 8192);
  const ModelConfig& config = *mistral.config;
  EXPECT_EQ(config.type, "mistral");
  check_sequence(config, 8192);
  // 32 layers of 2 x 2 x 4096 operations per pair: a token sees 4096.5 tokens on
  // average and 3072.25 within windows, of 2 x 7.11 billion operations without
  expect_text(remarks_of(mistral),
              {"refuses samples of 8192 tokens", "parameters +0.00 %",
               "operations per token by +3.39 %"});
}

TEST(PlannerStandIn, NoCommandTrainsIt) {
  const std::vector<std::string> words = {
      "--world-size", "8", "--batch", "64", "--seq", "2048",
      "--top",        "1", "--tp",    "1",  "--pp",  "1"};
  const std::string text = planned(released("gemma-2-2b"), words);
  expect_text(text, {"2.61 billion parameters", "Note: it is planned as a"});
  EXPECT_FALSE(has_text(text, "shardbook run"));
  expect_text(planned("llama-3.2-1b", words), {"./shardbook run hybrid --"});

  std::vector<std::string> more = words;
  more.insert(more.end(), {"--format", "json", "--confirm"});
  const json result = json::parse(planned(released("gemma-2-2b"), more));
  EXPECT_EQ(result.at("planned_as").at("model_type"), "llama");
  EXPECT_EQ(result.at("remarks").size(), 2u);
  const json& best = result.at("best").at(0);
  EXPECT_FALSE(best.contains("command"));
  EXPECT_NEAR(best.at("confirmed").at("step_s").get<double>() /
                  best.at("step_s").get<double>(),
              1, 0.06);
  more = words;
  more.insert(more.end(), {"--dropout", "0.1"});
  expect_error([&] { planned(released("gemma-2-2b"), more); },
               {"--dropout 0.1", "without dropout"});
}

TEST(PlannerStandIn, KeysThatTrainingRefusesAreRemarks) {
  const std::vector<std::string> words = {"--world-size", "8", "--batch", "8",
                                          "--seq",        "64"};
  const std::string yarn = R"({"model_type": "llama", "hidden_size": 64,
                               "rope_scaling": {"type": "yarn"}})";
  expect_text(planned(yarn, words), {"training refuses", "\"yarn\""});
  expect_error([&] { planned(R"({"model_type": "t5"})", words); }, {"\"t5\""});
}

TEST(PlannerStandIn, RefusalsOfDegreesNameTheModel) {
  const auto file =
      std::filesystem::path(testing::TempDir()) / "stand_in_pythia.json";
  std::ofstream(file) << released("pythia-160m");
  expect_error(
      [&] {
        planned(file, {"--world-size", "8", "--batch", "8", "--seq", "4096"});
      },
      {"--seq 4096", "stand_in_pythia.json has 2048 positions"});
  const std::string text =
      planned(file, {"--world-size", "64", "--batch", "64", "--pp", "64"});
  expect_text(text, {"No plan fits", "--pp 64, --schedule 1f1b: 64 stages",
                     "14 layers"});
  EXPECT_FALSE(has_text(text, "model_type"));
}

}  // namespace
}  // namespace shardbook::planner
