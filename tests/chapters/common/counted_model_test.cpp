// Counts of models that the book does not train, against transformers and
// FlopCounterMode (tests/golden), published figures, and counts by hand.

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "chapters/common/models/counted_model.h"
#include "tests/chapters/common/llama_support.h"
#include "tests/support/errors.h"

namespace shardbook::common_test {
namespace {

using nlohmann::json;

CountedModel counted(const json& config) {
  return CountedModel::from_json(config.dump(), "c.json");
}

std::string refusal_of(const json& config) {
  return error_of([&] { counted(config); });
}

json released(const std::string& name) {
  return golden_json("released_models.json").at("models").at(name).at("config");
}

std::map<std::string, double> parts_of(const json& golden) {
  return golden.get<std::map<std::string, double>>();
}

TEST(CountedModel, ReleasedModelsHaveTheirParametersInAllAndPerPart) {
  const json models = golden_json("released_models.json").at("models");
  EXPECT_EQ(models.size(), 22u);
  for (const auto& [name, each] : models.items()) {
    const CountedModel model = counted(each.at("config"));
    EXPECT_EQ(model.parameters(), each.at("parameters")) << name;
    EXPECT_EQ(model.parts(), parts_of(each.at("parts"))) << name;
  }
}

/// Calls body(family, config, case) for each case of counted_models.json.
template <typename Body>
void for_each_case(const Body& body) {
  const json families = golden_json("counted_models.json").at("families");
  EXPECT_GT(families.size(), 55u);
  for (const auto& [family, groups] : families.items()) {
    for (const json& group : groups) {
      for (const json& each : group.at("cases")) {
        json config = group.at("keys");
        config.update(each.at("change"));
        config["model_type"] = family;
        body(family, config, each);
      }
    }
  }
}

// Defaults, one key changed, and nulls. What transformers refuses is refused.
TEST(CountedModel, EveryFamilyCountsAsInTransformers) {
  for_each_case(
      [](const std::string& family, const json& config, const json& expected) {
        if (!expected.contains("parts")) {
          EXPECT_NE(refusal_of(config), "") << config;
          return;
        }
        std::map<std::string, double> parts = counted(config).parts();
        // transformers has the decoder of images and text without a head
        if (family.find("_vl") != std::string::npos) parts.erase("head");
        EXPECT_EQ(parts, parts_of(expected.at("parts"))) << config;
      });
}

TEST(CountedModel, OperationsAreThoseOfTheFlopCounter) {
  int compared = 0;
  for_each_case(
      [&](const std::string&, const json& config, const json& expected) {
        if (!expected.contains("operations")) return;
        const CountedModel model = counted(config);
        EXPECT_EQ(model.operations(16, Mask::kIgnored),
                  expected.at("operations")[0])
            << config;
        EXPECT_EQ(model.backward_operations(16, Mask::kIgnored),
                  expected.at("operations")[1])
            << config;
        ++compared;
      });
  EXPECT_GT(compared, 250);
}

// Windows: which layers have one, and how long it is
TEST(CountedModel, LayersKeepTheTokensOfTheirWindows) {
  int shortened = 0;
  for_each_case([&](const std::string&, const json& config,
                    const json& expected) {
    if (!expected.contains("kept")) return;
    const CountedModel model = counted(config);
    EXPECT_DOUBLE_EQ(model.kv_bytes(16, 2, false) / model.kv_bytes(1, 2, false),
                     expected.at("kept"))
        << config;
    shortened += expected.at("kept") < 16 ? 1 : 0;
  });
  EXPECT_GT(shortened, 25);
}

// --- What follows from the rows ---------------------------------------------

TEST(CountedModel, ATokenVisitsItsExpertsAlone) {
  const CountedModel mixtral = counted(released("mixtral-8x7b"));
  EXPECT_EQ(mixtral.active(), 46702792704.0 - 45097156608.0 * 6 / 8);
  EXPECT_EQ(mixtral.active_in_blocks(), mixtral.active() - 2 * 131072000.0);
  // Shared experts act on every token, and a tied table is one table
  const CountedModel moe = counted(released("qwen1.5-moe-a2.7b"));
  EXPECT_EQ(moe.active(), 14315784192.0 - 12457082880.0 * 56 / 60);
  const CountedModel gemma = counted(released("gemma-2-2b"));
  EXPECT_EQ(gemma.active(), gemma.parameters());
  EXPECT_EQ(gemma.active_in_blocks(), gemma.parameters() - 589824000.0);
}

// Liu et al. 2025, "Insights into DeepSeek-V3", table 1: kB for each token
TEST(CountedModel, KeysAndValuesHaveTheirPublishedBytes) {
  const CountedModel deepseek = counted({{"model_type", "deepseek_v3"}});
  EXPECT_TRUE(deepseek.has_latent());
  EXPECT_EQ(deepseek.kv_bytes(1, 2, /*latent=*/true), 70272);
  // By hand: 128 heads, keys of 192, values of 128, in 61 layers
  EXPECT_EQ(deepseek.kv_bytes(10, 2, /*latent=*/false),
            10 * 61 * 128 * (192 + 128) * 2);
  const CountedModel llama = CountedModel::read("llama-3.1-405b");
  EXPECT_FALSE(llama.has_latent());
  EXPECT_EQ(llama.kv_bytes(1, 2, true), 516096);
}

TEST(CountedModel, AWindowBoundsKeysValuesAndOperations) {
  // Of 26 layers every second has a window of 4,096; 4 heads of keys, width 256
  const CountedModel gemma = counted(released("gemma-2-2b"));
  EXPECT_EQ(gemma.kv_bytes(8192, 2, false),
            13 * (4096 + 8192) * 2.0 * 4 * 256 * 2);
  // 8 heads; the first 4,096 tokens see 1, 2, ... and the others 4,096 each
  const double full = 8193.0 / 2;
  const double windowed = (4096.0 * 4097 / 2 + 4096.0 * 4096) / 8192;
  const double weights = gemma.parameters() - gemma.parts().at("norm");
  EXPECT_EQ(gemma.operations(8192, Mask::kCounted),
            2 * weights + 13 * (full + windowed) * 4 * 8 * 256);
  EXPECT_EQ(gemma.operations(8192, Mask::kIgnored),
            2 * weights + 26 * 8192.0 * 4 * 8 * 256);
  // Of a trained family, too: mistral's window is in every layer
  const CountedModel mistral = counted(released("mistral-7b-v0.1"));
  EXPECT_EQ(mistral.kv_bytes(8192, 2, false), mistral.kv_bytes(4096, 2, false));
}

// Scores of 192 elements, sums of 128; half of the pairs are hidden
TEST(CountedModel, LatentAttentionHasQueriesWiderThanValues) {
  const CountedModel model = counted({{"model_type", "deepseek_v3"}});
  EXPECT_EQ(model.operations(1001, Mask::kIgnored) -
                model.operations(1001, Mask::kCounted),
            61 * 128 * 2.0 * (192 + 128) * (1001 - 501));
}

// An indexer of 64 heads reads all tokens, a token sees 2,048 of them, and all are
// kept; by hand, as the golden operations have no mask
TEST(CountedModel, AnIndexerSelectsWhatATokenSees) {
  const CountedModel sparse = counted({{"model_type", "deepseek_v32"}});
  const CountedModel dense = counted(
      {{"model_type", "deepseek_v3"}, {"max_position_embeddings", 8192}});
  const double indexer = 61 * 8193 * (64 * 128 + 64.0);
  const double weights = 61 * 2.0 * (1536 * 8192 + 7168 * (128 + 64));
  const double seen = (2048.0 * 2049 / 2 + 6144 * 2048.0) / 8192;
  EXPECT_DOUBLE_EQ(
      sparse.operations(8192, Mask::kCounted) -
          dense.operations(8192, Mask::kCounted),
      indexer + weights + 61 * 2 * 128 * (192 + 128.0) * (seen - 8193.0 / 2));
  EXPECT_DOUBLE_EQ(sparse.operations(8192, Mask::kIgnored) -
                       sparse.backward_operations(8192, Mask::kIgnored) / 2,
                   weights + 61 * 2 * 8192 * (64 * 128 + 64.0));
  EXPECT_EQ(sparse.kv_bytes(8192, 2, /*latent=*/true),
            8192 * 61 * (512 + 64 + 128) * 2.0);
  EXPECT_EQ(sparse.palm_operations(8192) - 6 * sparse.active(),
            dense.palm_operations(8192) - 6 * dense.active());
}

// The last 20 layers have the keys of earlier ones, and one layer of five is full
TEST(CountedModel, LayersThatShareKeysKeepNone) {
  const auto kept = [](int shared) {
    const CountedModel model = counted(
        {{"model_type", "gemma4_text"}, {"num_kv_shared_layers", shared}});
    return model.kv_bytes(4096, 2, false);
  };
  constexpr double kFull = 4096 * 2.0 * 4 * 512 * 2,
                   kWindow = 512 * 2.0 * 4 * 256 * 2;
  EXPECT_EQ(kept(0), 5 * kFull + 25 * kWindow);
  EXPECT_EQ(kept(20), 1 * kFull + 9 * kWindow);
}

// Llama 4: pieces of 4 tokens, in which a token sees 1, 2, 3, 4; of 10 tokens the
// last piece has two
TEST(CountedModel, AChunkEndsWhatATokenSees) {
  BlockPart part;
  part.kind = PartKind::kAttention;
  part.window = 4;
  part.in_chunks = true;
  EXPECT_DOUBLE_EQ(part.seen(10), (10 + 10 + 1 + 2) / 10.0);
  part.in_chunks = false;
  EXPECT_DOUBLE_EQ(part.seen(10), (1 + 2 + 3 + 4 * 7) / 10.0);
  EXPECT_DOUBLE_EQ(part.seen(4), 2.5);
}

// In the words of their sources, with the released sizes
TEST(CountedModel, OthersCountOperationsFromParameters) {
  const CountedModel llama = CountedModel::read("llama-2-7b");
  const double attention = 12.0 * 32 * 32 * 128 * 2048;
  EXPECT_EQ(llama.palm_operations(2048), 6 * 6738415616.0 + attention);
  EXPECT_EQ(llama.torchtitan_operations(2048),
            6 * (6738415616.0 - 131072000) + attention);
  // A tied table multiplies: it is in torchtitan's N; so is a window of 4,096
  const CountedModel gemma = counted(released("gemma-2-2b"));
  EXPECT_EQ(gemma.torchtitan_operations(8192),
            6 * gemma.parameters() + 12.0 * 13 * 8 * 256 * (8192 + 4096));
}

// --- Files as released -------------------------------------------------------

TEST(CountedModel, WholeFilesAreCounted) {
  const json models = golden_json("whole_configs.json").at("models");
  EXPECT_GE(models.size(), 20u);
  std::set<std::string> families;
  for (const auto& [name, each] : models.items()) {
    const CountedModel model = counted(each.at("config"));
    EXPECT_EQ(model.parts(), parts_of(each.at("parts"))) << name;
    families.insert(model.type);
  }
  EXPECT_GE(families.size(), 12u);
  // 37 billion of 671 act on a token, by its authors
  const CountedModel r1 = counted(models.at("deepseek-r1").at("config"));
  EXPECT_EQ(static_cast<int>(r1.active() / 1e8), 375);
  ASSERT_EQ(r1.remarks.size(), 2u);
  expect_text(r1.remarks[1], {"num_nextn_predict_layers", "not counted"});
  // With keys that say what happens anyway, of which training knows that, too
  const CountedModel coder =
      counted(models.at("qwen3-coder-480b-a35b-instruct").at("config"));
  EXPECT_TRUE(coder.trained.has_value());
  EXPECT_TRUE(coder.remarks.empty());
  // A pattern of letters, beside the list that says the same
  const json types = {"sliding_attention", "full_attention"};
  const json exaone = {{"model_type", "exaone4"},
                       {"num_hidden_layers", 2},
                       {"layer_types", types},
                       {"sliding_window_pattern", "LG"}};
  EXPECT_EQ(refusal_of(exaone), "");
}

TEST(CountedModel, TheTextOfAMultimodalFileIsCounted) {
  json text = released("gemma-2-2b");
  const CountedModel alone = counted(text);
  const CountedModel model =
      counted({{"model_type", "paligemma"},
               {"text_config", text},
               {"vision_config", {{"hidden_size", 1152}}}});
  EXPECT_EQ(model.parameters(), alone.parameters());
  ASSERT_FALSE(model.remarks.empty());
  expect_text(model.remarks[0], {"text model alone", "paligemma"});
  // The whole model's key says whether the text model's tables are one
  const CountedModel untied = counted({{"model_type", "paligemma"},
                                       {"tie_word_embeddings", false},
                                       {"text_config", text}});
  EXPECT_EQ(untied.parameters(), alone.parameters() + 589824000);
  // Qwen2-VL's files have the sizes beside "vision_config"
  const CountedModel qwen = counted({{"model_type", "qwen2_vl"},
                                     {"hidden_size", 1536},
                                     {"num_attention_heads", 12},
                                     {"num_key_value_heads", 2},
                                     {"num_hidden_layers", 28},
                                     {"intermediate_size", 8960},
                                     {"vocab_size", 151936},
                                     {"tie_word_embeddings", true},
                                     {"vision_config", json::object()}});
  EXPECT_EQ(qwen.parameters(), 1543714304);  // Qwen2-1.5B
}

// By hand from the sizes in its file: heads that predict further tokens stay out
TEST(CountedModel, KeysThatSayWhatHappensAnywayAreAccepted) {
  json minimax = {{"model_type", "minimax_m2"},
                  {"attn_type_list", std::vector<int>(62, 1)},
                  {"use_qk_norm", true},
                  {"qk_norm_type", "per_layer"},
                  {"shared_intermediate_size", 0},
                  {"use_mtp", true},
                  {"mtp_transformer_layers", 1},
                  {"num_mtp_modules", 3}};
  const CountedModel model = counted(minimax);
  EXPECT_EQ(model.parameters(),
            counted({{"model_type", "minimax_m2"}}).parameters());
  ASSERT_EQ(model.remarks.size(), 2u);
  expect_text(model.remarks[1], {"num_mtp_modules", "not counted"});
  for (const json& none : {json(0), json()}) {
    minimax["num_mtp_modules"] = none;
    EXPECT_EQ(counted(minimax).remarks.size(), 1u) << none;
  }
  minimax["attn_type_list"][61] = 0;
  expect_text(refusal_of(minimax),
              {"\"attn_type_list\" is [1,", "elements of [1] alone"});
  const CountedModel implied =
      counted({{"model_type", "gemma3"}, {"text_config", json::object()}});
  EXPECT_EQ(implied.type, "gemma3_text");
}

TEST(CountedModel, WhatTrainingRefusesIsARemarkWhereTheCountDoesNotNeedIt) {
  json config = released("llama-3.1-8b");
  EXPECT_TRUE(counted(config).remarks.empty());
  config["rope_scaling"] = {{"rope_type", "yarn"}, {"factor", 4.0}};
  config["quantization_config"] = {{"bits", 4}};
  const CountedModel model = counted(config);
  EXPECT_EQ(model.parameters(), 8030261248);
  EXPECT_TRUE(model.trained.has_value());
  ASSERT_EQ(model.remarks.size(), 1u);
  expect_text(model.remarks[0], {"training refuses", "quantization_config"});
  // A GPT-2 with an MLP of another width is counted, and not trained
  const CountedModel gpt = counted({{"model_type", "gpt2"}, {"n_inner", 1000}});
  EXPECT_FALSE(gpt.trained.has_value());
  EXPECT_EQ(gpt.parts().at("mlp"), 12 * (2 * 768 * 1000 + 1000 + 768));
}

// By hand: InternLM2-7B and Baichuan2-7B, whose code is in their repositories
TEST(CountedModel, RowsWithoutAClassInTransformersAreCounted) {
  const auto seven_billion = [](const char* type, json more) {
    more.update({{"model_type", type},
                 {"hidden_size", 4096},
                 {"num_hidden_layers", 32},
                 {"num_attention_heads", 32}});
    return counted(more).parameters();
  };
  EXPECT_EQ(seven_billion("internlm2", {{"vocab_size", 92544},
                                        {"num_key_value_heads", 8},
                                        {"intermediate_size", 14336},
                                        {"bias", false}}),
            2 * 92544.0 * 4096 + 4096 +
                32 * (4096.0 * (6144 + 4096 + 3 * 14336) + 2 * 4096));
  EXPECT_EQ(seven_billion("baichuan", {{"vocab_size", 125696},
                                       {"intermediate_size", 11008}}),
            2 * 125696.0 * 4096 + 4096 +
                32 * (4096.0 * (4 * 4096 + 3 * 11008) + 2 * 4096));
}

TEST(CountedModel, AClassifierIsCountedAsALanguageModelAndSaysSo) {
  json config = released("llama-3.1-8b");
  config["architectures"] = {"LlamaForSequenceClassification"};
  const CountedModel model = counted(config);
  EXPECT_EQ(model.parameters(), 8030261248);
  ASSERT_EQ(model.remarks.size(), 2u);
  expect_text(model.remarks[0],
              {"LlamaForSequenceClassification", "as a language model"});
}

TEST(CountedModel, RefusalsNameTheKeyTheValueAndWhatIsAllowed) {
  struct Row {
    json config;
    std::vector<std::string> parts;
  };
  const std::vector<Row> rows = {
      {{{"model_type", "mamba"}}, {"\"mamba\"", "are counted", "gemma2"}},
      {{{"model_type", "t5"}}, {"\"t5\"", "are counted"}},
      {{{"model_type", "x"}, {"linear_key_head_dim", 128}},
       {"\"x\", with layers of linear", "linear_key_head_dim"}},
      {{{"model_type", "gemma4_text"}, {"num_kv_shared_layers", 30}},
       {"\"num_kv_shared_layers\" is 30", "30 layers"}},
      {{{"model_type", "gemma4_text"},
        {"num_hidden_layers", 2},
        {"num_kv_shared_layers", 1}},
       {"no earlier layer", "of layer 1"}},
      {{{"model_type", "gemma4_text"},
        {"enable_moe_block", true},
        {"num_experts", 8}},
       {"\"enable_moe_block\" is true", "is not given"}},
      {{{"model_type", "glm_moe_dsa"},
        {"num_hidden_layers", 2},
        {"layer_types", {"deepseek_sparse_attention", "indexed_attention"}},
        {"indexer_types", {"shared", "full"}}},
       {"\"indexer_types\" is", "the first layer"}},
      {{{"model_type", "glm_moe_dsa"},
        {"index_topk_freq", 2},
        {"index_skip_topk_offset", 0}},
       {"\"index_skip_topk_offset\" is 0", "the first layer"}},
      {{{"model_type", "glm_moe_dsa"}, {"indexer_types", json::array()}},
       {"\"indexer_types\" is []", "each of 78 layers"}},
      {{{"model_type", "glm_moe_dsa"}, {"mlp_layer_types", {"dense"}}},
       {"\"mlp_layer_types\" is [\"dense\"]", "each of 78 layers"}},
      {{{"model_type", "mimo_v2_flash"}, {"swa_head_dim", 64}},
       {"\"swa_head_dim\" is 64", "with 192 alone"}},
      {{{"model_type", "mimo_v2_flash"},
        {"hybrid_layer_pattern", std::vector<int>(48, 1)}},
       {"\"hybrid_layer_pattern\" is [1,", "transformers passes over"}},
      {{{"model_type", "qwen2_moe"},
        {"mlp_only_layers", std::vector<int>(20000)}},
       {"a list of at most 16384"}},
      {{{"model_type", 7}}, {"\"model_type\" is 7"}},
      {{{"model_type", "decoder"}}, {"\"decoder\""}},
      {{{"model_type", "phi"}, {"hidden_size", "x"}},
       {"\"hidden_size\" is \"x\"", "an integer from 1"}},
      {{{"model_type", "phi"}, {"hidden_size", -4}}, {"is -4"}},
      {{{"model_type", "phi"}, {"hidden_size", 1e300}}, {"1e+300"}},
      {{{"model_type", "phi"}, {"qk_layernorm", 1}}, {"true or false"}},
      {{{"model_type", "phi"}, {"num_key_value_heads", 5}},
       {"5 heads of keys do not divide 32"}},
      {{{"model_type", "phi"}, {"num_atention_heads", 5}},
       {"\"num_atention_heads\" is 5", "did you mean \"num_attention_heads\""}},
      {{{"model_type", "phi"}, {"surprise", {1}}},
       {"\"surprise\" is [1]", "not known"}},
      {{{"model_type", "gemma"}, {"num_local_experts", 8}},
       {"\"num_local_experts\" is 8", "no such key"}},
      {{{"model_type", "mpt"}, {"no_bias", false}},
       {"\"no_bias\" is false", "with true alone"}},
      {{{"model_type", "mpt"}, {"attn_config", {{"qk_ln", true}}}},
       {"\"attn_config.qk_ln\" is true"}},
      {{{"model_type", "olmoe"}, {"num_experts_per_tok", 65}},
       {"65 experts per token, and there are 64"}},
      {{{"model_type", "gemma3_text"},
        {"layer_types", {"mamba"}},
        {"num_hidden_layers", 1}},
       {"\"layer_types\" is [\"mamba\"]", "for each of 1 layers"}},
      {{{"model_type", "gemma3_text"}, {"layer_types", {"full_attention"}}},
       {"for each of 26 layers"}},
      {{{"model_type", "gptj"}, {"n_embd", 64}, {"hidden_size", 128}},
       {"\"n_embd\" is 64, but \"hidden_size\"", "128"}},
      {{{"model_type", "falcon"}, {"num_ln_in_parallel_attn", 1 << 30}},
       {"\"num_ln_in_parallel_attn\" is 1073741824", "from 1 to 2"}},
      {{{"model_type", "dots1"}}, {"needs \"num_experts_per_tok\""}},
      {{{"model_type", "gpt_neox"},
        {"num_hidden_layers", 16384},
        {"hidden_size", 2147483647}},
       {"more than 1e+15 parameters"}},
      {{{"model_type", "llava"}, {"text_config", {1}}}, {"give an object"}},
      {{{"model_type", "llava"}, {"text_config", json::object()}},
       {"has no model_type"}}};
  for (const Row& row : rows) {
    const std::string refusal = refusal_of(row.config);
    EXPECT_EQ(refusal.rfind("c.json: ", 0), 0u) << row.config << refusal;
    expect_text(refusal, row.parts);
  }
  // What is off in a class without the key is no error
  EXPECT_EQ(refusal_of({{"model_type", "gemma"}, {"num_local_experts", 0}}),
            "");
}

}  // namespace
}  // namespace shardbook::common_test
