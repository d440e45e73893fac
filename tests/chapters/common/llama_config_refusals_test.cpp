// config.json of the Llama family: what is refused, by name.

#include <gtest/gtest.h>

#include <array>
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

// Each key's first value would change the model and is refused. Its second
// value is what the model computes here, so it is accepted.
TEST(LlamaConfig, KeysThatWouldChangeTheFunctionAreRefused) {
  const std::vector<std::array<std::string, 4>> keys = {
      {"llama", "hidden_act", R"("gelu")", R"("silu")"},
      {"llama", "partial_rotary_factor", "0.5", "1.0"},
      {"llama", "rope_interleaved", "true", "false"},
      {"qwen2", "use_mrope", "true", "false"},
      {"llama", "is_llama_config", "false", "true"},
      {"llama", "add_cross_attention", "true", "false"},
      {"llama", "pruned_heads", R"({"0": [1]})", "{}"},
      {"llama", "quantization_config", R"({"bits": 4})", "null"},
      {"llama", "torchscript", "true", "false"},
      {"llama", "is_encoder_decoder", "true", "false"},
      {"llama", "per_layer_config", R"({"0": {"head_dim": 1}})", "null"},
      {"llama", "loss_type", R"("ForTokenClassification")", "null"},
      {"llama", "auto_map", R"({"AutoModel": "modeling_x.X"})", "null"},
      {"llama", "architectures", R"(["LlamaForSequenceClassification"])",
       R"(["LlamaForCausalLM"])"},
      {"qwen3_moe", "architectures", R"(["Qwen3ForCausalLM"])",
       R"(["Qwen3MoeForCausalLM"])"},
      {"mistral", "attention_bias", "true", "false"},
      {"qwen2", "attention_bias", "false", "true"},
      {"qwen3", "mlp_bias", "true", "false"},
      {"mixtral", "router_jitter_noise", "0.1", "0.0"},
      {"mixtral", "norm_topk_prob", "false", "true"},
      // Which transformers passes over
      {"qwen3_moe", "shared_expert_intermediate_size", "128", "0"},
      {"qwen3_moe", "use_qk_norm", "false", "true"},
      {"qwen3_moe", "qkv_bias", "true", "false"},
      {"qwen2", "qkv_bias", "false", "true"},
      {"llama", "use_qk_norm", "true", "false"}};
  for (const auto& [type, key, bad, good] : keys) {
    expect_text(refusal_of_llama(small_config(type, {{key, json::parse(bad)}})),
                {"c.json: \"" + key + "\" is "});
    EXPECT_EQ(refusal_of_llama(small_config(type, {{key, json::parse(good)}})),
              "")
        << key;
  }
}

TEST(LlamaConfig, KeysThatNobodyKnowsAreRefusedByNameWithTheirValue) {
  for (const auto& [key, value] :
       std::map<std::string, std::string>{{"attention_multiplier", "0.5"},
                                          {"residual_multiplier", "0.2"},
                                          {"logits_scaling", "8.0"},
                                          {"final_logit_softcapping", "30.0"},
                                          {"no_rope_layers", "[1,1,0]"},
                                          {"num_experts", "8"},
                                          {"n_embd", "64"}}) {
    expect_text(
        refusal_of_llama(small_config("llama", {{key, json::parse(value)}})),
        {"c.json: \"" + key + "\" is " + value, "not followed here",
         "rotary positions"});
  }
  expect_text(
      refusal_of_llama(small_config("llama", {{"num_key_value_head", 1}})),
      {"did you mean \"num_key_value_heads\"?"});
  expect_text(refusal_of_llama({{"model_type", "llama"}}),
              {"no size", "hidden_size, intermediate_size"});
  expect_text(refusal_of_llama(small_config("gemma")),
              {"\"gemma\"", "\"gpt2\"", "llama", "qwen3_moe"});
}

// As published: keys of other programs' authors.
TEST(LlamaConfig, RemarksOfPublishedConfigsArePassedOver) {
  EXPECT_EQ(refusal_of_llama(
                small_config("llama", json::parse(R"({"is_llama_config": true,
                    "rope_interleaved": false, "torch_dtype": "bfloat16",
                    "transformers.js_config": {"kv_cache_dtype": {}},
                    "pretraining_tp": 1, "max_sequence_length": 2048,
                    "eos_token_id": [128001, 128008], "use_cache": true,
                    "attention_dropout": null, "unsloth_fixed": true})"))),
            "");
  EXPECT_EQ(
      refusal_of_llama(small_config("qwen2", {{"use_mrope", false},
                                              {"max_window_layers", 21},
                                              {"attention_dropout", 0.1}})),
      "");
}

TEST(LlamaConfig, SizesThatDoNotFitTogetherAreRefused) {
  expect_text(
      refusal_of_llama(small_config("llama", {{"num_key_value_heads", 5}})),
      {"\"num_key_value_heads\" is 5", "32"});
  expect_text(
      refusal_of_llama(small_config("qwen2", {{"num_attention_heads", 4}})),
      {"\"num_key_value_heads\" is 32 where it is absent", "4"});
  expect_text(refusal_of_llama(small_config("llama", {{"hidden_size", 80}})),
              {"hidden_size 80", "32"});
  expect_text(refusal_of_llama(small_config("llama", {{"head_dim", 7}})),
              {"width 7", "even"});
  expect_text(refusal_of_llama(small_config("mistral", {{"hidden_size", 16}})),
              {"width 0"});
  // transformers leaves a remainder where the class does not check
  EXPECT_EQ(read_config(small_config("mistral", {{"hidden_size", 80}}))
                .llama.head_dim,
            2);
  for (const char* key : {"hidden_size", "vocab_size", "intermediate_size",
                          "num_hidden_layers", "num_attention_heads"}) {
    expect_text(refusal_of_llama(small_config("llama", {{key, nullptr}})),
                {std::string("\"") + key + "\" is null"});
    expect_text(refusal_of_llama(small_config("llama", {{key, 1LL << 40}})),
                {key, "at most"});
  }
  expect_text(refusal_of_llama(small_config(
                  "qwen3_moe", {{"num_hidden_layers", 4096},
                                {"hidden_size", 1 << 20},
                                {"num_experts", 1 << 14},
                                {"head_dim", 64},
                                {"moe_intermediate_size", 1 << 20}})),
              {"parameters"});
}

TEST(LlamaConfig, SequencesMustFitThePositionsAndTheWindow) {
  const ModelConfig mistral = read_config(small_config(
      "mistral", {{"max_position_embeddings", 64}, {"sliding_window", 16}}));
  check_sequence(mistral, 16);
  expect_error([&] { check_sequence(mistral, 17); },
               {"mistral", "17 tokens", "sliding_window is 16"});
  const ModelConfig llama =
      read_config(small_config("llama", {{"max_position_embeddings", 64}}));
  check_sequence(llama, 64);
  expect_error([&] { check_sequence(llama, 65); },
               {"65 tokens", "max_position_embeddings is 64"});
  check_sequence(ModelConfig{}, 1 << 20);
}

}  // namespace
}  // namespace shardbook::common_test
