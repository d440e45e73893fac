// config.json of the Llama family: defaults, spellings, sizes.

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "chapters/common/models/models.h"
#include "tests/chapters/common/llama_support.h"
#include "tests/support/errors.h"

namespace shardbook::common_test {
namespace {

using nlohmann::json;
using Kind = RopeScaling::Kind;

const std::vector<std::string> kTypes = {"llama", "mistral", "qwen2",
                                         "qwen3", "mixtral", "qwen3_moe"};

// The defaults of each class differ. As measured with transformers 5.24.
TEST(LlamaConfig, AnAbsentKeyHasTheDefaultOfItsClass) {
  struct Row {
    std::string type;
    std::int64_t kv, d;
    double theta, eps;
    std::int64_t window, experts, per_token, positions;
    bool norm, qkv_bias, qk_norm;
  };
  for (const Row& row :
       {Row{"llama", 32, 2, 1e4, 1e-6, 0, 0, 0, 2048, false, false, false},
        Row{"mistral", 8, 2, 1e4, 1e-6, 4096, 0, 0, 131072, false, false,
            false},
        Row{"qwen2", 32, 2, 1e4, 1e-6, 0, 0, 0, 32768, false, true, false},
        Row{"qwen3", 32, 128, 1e4, 1e-6, 0, 0, 0, 32768, false, false, true},
        Row{"mixtral", 8, 2, 1e6, 1e-5, 0, 8, 2, 131072, true, false, false},
        Row{"qwen3_moe", 4, 2, 1e4, 1e-6, 0, 128, 8, 32768, false, false,
            true}}) {
    SCOPED_TRACE(row.type);
    const ModelConfig config = read_config(small_config(row.type));
    const LlamaConfig& llama = config.llama;
    EXPECT_TRUE(config.is_llama());
    EXPECT_EQ(llama.kv_heads, row.kv);
    EXPECT_EQ(llama.head_dim, row.d);
    EXPECT_EQ(llama.rope_theta, row.theta);
    EXPECT_EQ(config.layer_norm_epsilon, row.eps);
    EXPECT_EQ(llama.sliding_window, row.window);
    EXPECT_EQ(llama.num_experts, row.experts);
    EXPECT_EQ(llama.experts_per_token, row.per_token);
    EXPECT_EQ(config.n_positions, row.positions);
    EXPECT_EQ(llama.norm_topk_prob, row.norm);
    EXPECT_EQ(llama.qkv_bias, row.qkv_bias);
    EXPECT_EQ(llama.qk_norm, row.qk_norm);
    EXPECT_FALSE(llama.o_bias || llama.mlp_bias || llama.tied);
    EXPECT_EQ(llama.rope.kind, Kind::kNone);
    EXPECT_EQ(config.initializer_range, 0.02);
  }
  EXPECT_EQ(read_config(small_config("qwen3_moe")).llama.moe_intermediate_size,
            768);
  EXPECT_EQ(read_config(small_config("mixtral", {{"intermediate_size", 24}}))
                .llama.moe_intermediate_size,
            24);
  EXPECT_EQ(read_config(small_config("mixtral")).llama.router_aux_loss_coef,
            0.001);
}

TEST(LlamaConfig, ANullIsADefaultOrRefusedAsTransformersDoes) {
  const std::map<std::string, std::array<std::int64_t, 2>> expected = {
      {"llama", {32, 2}}, {"mistral", {0, 2}}, {"qwen2", {32, 0}},
      {"qwen3", {32, 0}}, {"mixtral", {0, 2}}, {"qwen3_moe", {0, 0}}};
  for (const auto& [type, values] : expected) {
    SCOPED_TRACE(type);
    const json kv = small_config(type, {{"num_key_value_heads", nullptr}});
    const json d = small_config(type, {{"head_dim", nullptr}});
    if (values[0] > 0) {
      EXPECT_EQ(read_config(kv).llama.kv_heads, values[0]);
    } else {
      expect_text(refusal_of_llama(kv),
                  {"c.json: \"num_key_value_heads\" is null"});
    }
    if (values[1] > 0) {
      EXPECT_EQ(read_config(d).llama.head_dim, values[1]);
    } else {
      expect_text(refusal_of_llama(d), {"c.json: \"head_dim\" is null"});
    }
  }
}

TEST(LlamaConfig, AWholeConfigOfTransformersIsRead) {
  const json all = golden_json("transformers_configs.json");
  EXPECT_EQ(all.size(), 24u);
  std::map<std::string, std::string> first;
  for (const json& each : all) {
    SCOPED_TRACE(each.dump());
    const ModelConfig config = read_config(each);
    // Whoever wrote it, the defaults of a class are one model
    const auto [at, is_new] = first.emplace(config.type, config.to_json());
    EXPECT_EQ(at->second, config.to_json());
  }
  EXPECT_EQ(first.size(), 6u);
}

TEST(LlamaConfig, SurvivesItsOwnJson) {
  std::vector<ModelConfig> configs;
  for (const std::string& name : golden_models()) {
    configs.push_back(golden_config(name));
  }
  for (const std::string& type : kTypes)
    configs.push_back(read_config(small_config(type)));
  configs.push_back(read_config(small_config(
      "qwen3", {{"use_sliding_window", true}, {"max_window_layers", 3}})));
  configs.push_back(
      read_config(small_config("qwen3_moe", {{"mlp_only_layers", {1}},
                                             {"attention_bias", true},
                                             {"decoder_sparse_step", 2},
                                             {"norm_topk_prob", true}})));
  for (const ModelConfig& config : configs) {
    const ModelConfig again = ModelConfig::from_json(config.to_json(), "x");
    EXPECT_EQ(again.to_json(), config.to_json());
    EXPECT_EQ(again.type, config.type);
    EXPECT_EQ(again.llama.sliding_blocks, config.llama.sliding_blocks);
    EXPECT_EQ(again.llama.has_experts, config.llama.has_experts);
    EXPECT_EQ(num_parameters(again), num_parameters(config));
  }
}

// Files for both versions of transformers: 4.57 does not know rope_parameters,
// and of the number of experts each reads a name of its own.
TEST(LlamaConfig, IsWrittenInKeysThatBothVersionsRead) {
  const auto written = [](const json& object) {
    return json::parse(read_config(object).to_json());
  };
  const json scaled = written(small_config(
      "llama",
      {{"rope_parameters",
        {{"rope_type", "linear"}, {"factor", 2.5}, {"rope_theta", 77.0}}}}));
  EXPECT_EQ(scaled["rope_theta"], 77.0);
  EXPECT_EQ(scaled["rope_scaling"],
            json({{"rope_type", "linear"}, {"factor", 2.5}}));
  EXPECT_FALSE(scaled.contains("rope_parameters"));
  EXPECT_EQ(scaled["architectures"], json({"LlamaForCausalLM"}));
  const json moe = written(small_config("qwen3_moe", {{"num_experts", 16}}));
  EXPECT_EQ(moe["num_experts"], 16);
  EXPECT_EQ(moe["num_local_experts"], 16);
  EXPECT_EQ(moe["architectures"], json({"Qwen3MoeForCausalLM"}));
  // Where the key is absent, a mistral has a window
  EXPECT_TRUE(written(small_config("mistral", {{"sliding_window", nullptr}}))
                  .at("sliding_window")
                  .is_null());
  const json slides = written(small_config(
      "qwen2", {{"use_sliding_window", true}, {"max_window_layers", 3}}));
  EXPECT_EQ(slides["layer_types"],
            json({"full_attention", "full_attention", "full_attention",
                  "sliding_attention"}));
}

// --- Rotary positions --------------------------------------------------------

LlamaConfig with_rope(const json& keys) {
  return read_config(small_config("llama", keys)).llama;
}

TEST(LlamaRope, IsReadInThreeSpellings) {
  const json llama3 = {{"factor", 8.0},
                       {"low_freq_factor", 1.5},
                       {"high_freq_factor", 3.0},
                       {"original_max_position_embeddings", 512}};
  json by_type = llama3, by_rope_type = llama3, from_5 = llama3;
  by_type["type"] = "llama3";
  by_rope_type["rope_type"] = "llama3";
  from_5.update({{"rope_type", "llama3"}, {"rope_theta", 500.0}});
  for (const json& keys :
       {json{{"rope_theta", 500.0}, {"rope_scaling", by_type}},
        json{{"rope_theta", 500}, {"rope_scaling", by_rope_type}},
        json{{"rope_parameters", from_5}},
        // The one inside wins
        json{{"rope_theta", 9.0}, {"rope_parameters", from_5}},
        json{{"rope_theta", 9.0}, {"rope_scaling", from_5}},
        json{{"rope_theta", nullptr}, {"rope_scaling", from_5}},
        // The one outside fills in
        json{{"rope_theta", 500.0}, {"rope_parameters", by_rope_type}},
        // Both say the same
        json{{"rope_theta", 500.0},
             {"rope_scaling", by_type},
             {"rope_parameters", from_5}},
        json{{"rope_scaling", json::object()}, {"rope_parameters", from_5}},
        json{{"rope_scaling", nullptr}, {"rope_parameters", from_5}}}) {
    SCOPED_TRACE(keys.dump());
    const LlamaConfig llama = with_rope(keys);
    EXPECT_EQ(llama.rope_theta, 500);
    EXPECT_EQ(llama.rope.kind, Kind::kLlama3);
    EXPECT_EQ(llama.rope.factor, 8);
    EXPECT_EQ(llama.rope.low_freq_factor, 1.5);
    EXPECT_EQ(llama.rope.high_freq_factor, 3);
    EXPECT_EQ(llama.rope.original_positions, 512);
  }
  const LlamaConfig plain = with_rope(
      {{"rope_parameters", {{"rope_type", "default"}, {"rope_theta", 7}}}});
  EXPECT_EQ(plain.rope.kind, Kind::kNone);
  EXPECT_EQ(plain.rope_theta, 7);
  const LlamaConfig linear =
      with_rope({{"rope_scaling", {{"type", "linear"}, {"factor", 2.0}}}});
  EXPECT_EQ(linear.rope.kind, Kind::kLinear);
  EXPECT_EQ(linear.rope.factor, 2);
}

// The angles change all the same.
TEST(LlamaRope, Llama3WithoutTheOriginalPositionsHasThoseOfTheModel) {
  const json keys = {{"rope_type", "llama3"},
                     {"factor", 8.0},
                     {"low_freq_factor", 1.0},
                     {"high_freq_factor", 4.0}};
  const LlamaConfig llama =
      with_rope({{"rope_scaling", keys}, {"max_position_embeddings", 321}});
  EXPECT_EQ(llama.rope.original_positions, 321);
}

TEST(LlamaRope, IsRefusedByNameWhereItIsNotComputed) {
  const auto text = [](const json& keys) {
    return refusal_of_llama(small_config("llama", keys));
  };
  for (const std::string kind : {"yarn", "dynamic", "longrope", "su"}) {
    expect_text(text({{"rope_scaling", {{"type", kind}, {"factor", 2.0}}}}),
                {"\"rope_scaling\": frequencies are scaled by \"" + kind});
    expect_text(text({{"rope_parameters", {{"rope_type", kind}}}}),
                {"\"rope_parameters\"", kind, "llama3"});
  }
  expect_text(text({{"rope_scaling", {{"factor", 2.0}}}}),
              {"\"rope_scaling\": \"factor\" is 2.0", "no rope_type"});
  expect_text(
      text({{"rope_scaling", {{"rope_type", "default"}, {"factor", 2}}}}),
      {"\"factor\" is 2"});
  expect_text(text({{"rope_scaling", {{"rope_type", "linear"}}}}),
              {"\"factor\" is missing"});
  expect_text(
      text({{"rope_scaling", {{"rope_type", "llama3"}, {"factor", 2}}}}),
      {"\"low_freq_factor\" is missing"});
  expect_text(
      text({{"rope_scaling", {{"rope_type", "linear"}, {"type", "llama3"}}}}),
      {"\"type\" is \"llama3\"", "\"rope_type\" is \"linear\""});
  expect_text(
      text({{"rope_scaling",
             {{"rope_type", "linear"}, {"factor", 2.0}, {"mscale", 0.7}}}}),
      {"\"mscale\" is 0.7"});
  expect_text(
      text({{"rope_scaling", {{"rope_type", "linear"}, {"factor", 2.0}}},
            {"rope_parameters", {{"rope_type", "linear"}, {"factor", 4.0}}}}),
      {"\"rope_scaling\" and \"rope_parameters\" differ"});
  expect_text(text({{"rope_scaling", 2.0}}), {"\"rope_scaling\" is 2.0"});
  expect_text(text({{"rope_theta", nullptr}}), {"\"rope_theta\" is null"});
  expect_text(text({{"rope_theta", -1}}), {"\"rope_theta\" is -1"});
  json llama3 = {{"rope_type", "llama3"},
                 {"factor", 8.0},
                 {"low_freq_factor", 4.0},
                 {"high_freq_factor", 4.0},
                 {"original_max_position_embeddings", 64}};
  expect_text(text({{"rope_scaling", llama3}}), {"\"low_freq_factor\" is 4"});
  llama3["low_freq_factor"] = 1.0;
  expect_text(text({{"rope_scaling", llama3},
                    {"original_max_position_embeddings", 32}}),
              {"\"original_max_position_embeddings\" is 32"});
  EXPECT_EQ(text({{"rope_scaling", llama3},
                  {"original_max_position_embeddings", 64}}),
            "");
}

// --- Windows and experts -----------------------------------------------------

TEST(LlamaConfig, WindowsSlideWhereTheClassSaysSo) {
  struct Row {
    std::string type;
    json keys;
    std::int64_t window;
    std::vector<std::int64_t> blocks;
  };
  const json full = {"full_attention", "full_attention", "full_attention",
                     "full_attention"};
  const json last = {"full_attention", "full_attention", "full_attention",
                     "sliding_attention"};
  for (const Row& row : std::vector<Row>{
           {"mistral", {}, 4096, {0, 1, 2, 3}},
           {"mistral", {{"sliding_window", nullptr}}, 0, {}},
           {"mistral", {{"sliding_window", 9}}, 9, {0, 1, 2, 3}},
           {"mistral", {{"layer_types", full}}, 4096, {0, 1, 2, 3}},
           {"mixtral", {{"sliding_window", 9}}, 9, {0, 1, 2, 3}},
           {"qwen2", {{"sliding_window", 9}}, 0, {}},
           {"qwen2",
            {{"sliding_window", 9}, {"use_sliding_window", true}},
            0,
            {}},  // from layer 28 on
           {"qwen2",
            {{"sliding_window", 9},
             {"use_sliding_window", true},
             {"max_window_layers", 2}},
            9,
            {2, 3}},
           {"qwen3",
            {{"use_sliding_window", true}, {"max_window_layers", 0}},
            4096,
            {0, 1, 2, 3}},
           {"qwen3",
            {{"use_sliding_window", true},
             {"max_window_layers", 0},
             {"layer_types", full}},
            0,
            {}},
           {"qwen3",
            {{"use_sliding_window", true}, {"layer_types", last}},
            4096,
            {3}},
           {"qwen3_moe",
            {{"use_sliding_window", true}, {"max_window_layers", 2}},
            4096,
            {0, 1, 2, 3}},
           {"llama",
            {{"use_sliding_window", false},
             {"sliding_window", 9},
             {"max_window_layers", 2},
             {"layer_types", full}},
            0,
            {}}}) {
    SCOPED_TRACE(row.type + row.keys.dump());
    const LlamaConfig llama =
        read_config(small_config(row.type, row.keys)).llama;
    EXPECT_EQ(llama.sliding_window, row.window);
    EXPECT_EQ(llama.sliding_blocks, row.blocks);
  }
  const auto refuse = [](const std::string& type, const json& keys,
                         const std::vector<std::string>& parts) {
    expect_text(refusal_of_llama(small_config(type, keys)), parts);
  };
  refuse("qwen2", {{"layer_types", last}},
         {"\"layer_types\"", "no sliding_window"});
  refuse("qwen2", {{"layer_types", {"full_attention"}}},
         {"\"layer_types\" has 1 layers", "is 4"});
  refuse("qwen2", {{"layer_types", {"chunked_attention"}}},
         {"\"layer_types\" is [\"chunked_attention\"]"});
  refuse("mistral", {{"layer_types", last}}, {"\"layer_types\"", "mistral"});
  refuse("mistral", {{"use_sliding_window", false}},
         {"\"use_sliding_window\" is false", "mistral"});
  refuse("llama", {{"sliding_window", 9}}, {"\"sliding_window\"", "a llama"});
  refuse("llama", {{"use_sliding_window", true}}, {"\"use_sliding_window\""});
  refuse("qwen2", {{"use_sliding_window", 1}}, {"\"use_sliding_window\" is 1"});
}

TEST(LlamaConfig, OfTwoNamesOfTheNumberOfExpertsTheClassChooses) {
  for (const std::string name : {"num_experts", "num_local_experts"}) {
    for (const std::string type : {"mixtral", "qwen3_moe"}) {
      EXPECT_EQ(read_config(small_config(type, {{name, 16}})).llama.num_experts,
                16);
    }
  }
  const json both = {{"num_experts", 16}, {"num_local_experts", 32}};
  EXPECT_EQ(read_config(small_config("mixtral", both)).llama.num_experts, 16);
  EXPECT_EQ(read_config(small_config("qwen3_moe", both)).llama.num_experts, 32);
}

TEST(LlamaConfig, SaysWhichBlocksHaveExperts) {
  const auto blocks = [](const json& keys) {
    return read_config(small_config("qwen3_moe", keys)).llama.has_experts;
  };
  using Blocks = std::vector<bool>;
  EXPECT_EQ(blocks({}), (Blocks{true, true, true, true}));
  EXPECT_EQ(blocks({{"mlp_only_layers", {0, 3, 99}}}),
            (Blocks{false, true, true, false}));
  EXPECT_EQ(blocks({{"mlp_only_layers", nullptr}}),
            (Blocks{true, true, true, true}));
  // Every third: layer 2
  EXPECT_EQ(blocks({{"decoder_sparse_step", 3}}),
            (Blocks{false, false, true, false}));
  EXPECT_EQ(blocks({{"decoder_sparse_step", 2}, {"mlp_only_layers", {1}}}),
            (Blocks{false, false, false, true}));
  EXPECT_TRUE(read_config(small_config("llama")).llama.has_experts.empty());
  expect_text(
      refusal_of_llama(small_config("qwen3_moe", {{"mlp_only_layers", "all"}})),
      {"\"mlp_only_layers\" is \"all\""});
  expect_text(
      refusal_of_llama(small_config("mixtral", {{"num_experts_per_tok", 9}})),
      {"\"num_experts_per_tok\" is 9", "8 experts"});
  EXPECT_EQ(read_config(small_config("mixtral", {{"router_aux_loss_coef", 0}}))
                .llama.router_aux_loss_coef,
            0);
}

// --- Parameters --------------------------------------------------------------

json released_llamas() {
  json released = golden_json("released_models.json").at("models");
  for (auto each = released.begin(); each != released.end();) {
    ModelConfig config;
    config.type = each->at("config").at("model_type");
    each = config.is_llama() ? std::next(each) : released.erase(each);
  }
  return released;
}

TEST(LlamaConfig, ReleasedModelsHaveTheirParameters) {
  const json released = released_llamas();
  EXPECT_EQ(released.size(), 11u);
  for (const auto& [name, model] : released.items()) {
    EXPECT_EQ(num_parameters(read_config(model.at("config"))),
              model.at("parameters"))
        << name;
  }
}

TEST(LlamaConfig, PresetsAreTheReleasedModels) {
  const json released = released_llamas();
  for (const auto& [name, model] : released.items()) {
    const ModelConfig preset = ModelConfig::read(
        name == "mistral-7b-v0.1" ? std::string("mistral-7b") : name);
    EXPECT_EQ(num_parameters(preset), model.at("parameters")) << name;
    // Of keys that the table leaves out, the preset has the released values
    json expected = json::parse(read_config(model.at("config")).to_json());
    for (const char* key : {"rms_norm_eps", "initializer_range"}) {
      expected[key] = json::parse(preset.to_json()).at(key);
    }
    EXPECT_EQ(json::parse(preset.to_json()), expected) << name;
  }
  for (const auto& [name, parameters] : std::map<std::string, std::int64_t>{
           {"llama-nano", 217664}, {"llama-micro", 2951424}}) {
    const ModelConfig config = ModelConfig::read(name);
    EXPECT_EQ(num_parameters(config), parameters) << name;
    EXPECT_EQ(config.llama.rope_theta, 10000);
    EXPECT_EQ(config.llama.kv_heads, 2);
    EXPECT_EQ(config.layer_norm_epsilon, 1e-5);
    EXPECT_FALSE(config.llama.tied);
  }
  expect_error([] { num_parameters(ModelConfig{}); }, {"gpt2"});
}

}  // namespace
}  // namespace shardbook::common_test
