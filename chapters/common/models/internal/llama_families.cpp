#include "chapters/common/models/internal/llama_families.h"

#include <algorithm>
#include <iterator>

#include "chapters/common/models/internal/llama_json.h"
#include "core/check.h"

namespace shardbook {
namespace llama_families {
namespace {

constexpr std::int64_t kManyPositions = 131072;

constexpr Family kFamilies[] = {
    {"llama", "Llama", 32000, 4096, 11008, 32, 32, 0, 0, 2048, 1e-6, 1e4, 0,
     true, true, true, true, false, false},
    {"mistral", "Mistral", 32000, 4096, 14336, 32, 32, 8, 0, kManyPositions,
     1e-6, 1e4, 4096, false, true, false, false, false, false},
    {"qwen2", "Qwen2", 151936, 4096, 22016, 32, 32, 32, 0, 32768, 1e-6, 1e4,
     4096, true, false, false, false, true, true},
    {"qwen3", "Qwen3", 151936, 4096, 22016, 32, 32, 32, 128, 32768, 1e-6, 1e4,
     4096, true, false, true, false, true, true},
    {"mixtral", "Mixtral", 32000,          4096,  14336, 32, 32,
     8,         0,         kManyPositions, 1e-5,  1e6,   0,  false,
     true,      false,     false,          false, false, 8,  2},
    {"qwen3_moe", "Qwen3Moe", 151936, 2048, 6144,  24,   32,
     4,           0,          32768,  1e-6, 1e4,   4096, false,
     false,       true,       false,  true, false, 128,  8}};

}  // namespace

const Family& family_of(const std::string& type) {
  const auto* const found =
      std::find_if(std::begin(kFamilies), std::end(kFamilies),
                   [&](const Family& each) { return each.type == type; });
  SB_CHECK(found != std::end(kFamilies), "\"", type,
           "\" is no model of the Llama family");
  return *found;
}

std::vector<config_keys::FixedKey> fixed_keys(const Family& family) {
  std::vector<config_keys::FixedKey> keys = config_keys::fixed_of_llama();
  const std::string type = family.type;
  if (!family.has_attention_bias) {
    keys.push_back({"attention_bias",
                    {type == "qwen2"},
                    type == "qwen2"
                        ? "a qwen2 has biases on q, k and v"
                        : "its projections have no biases in transformers"});
  }
  if (!family.has_mlp_bias) {
    keys.push_back({"mlp_bias", {false}, "its MLP has no biases"});
  }
  keys.push_back({"shared_expert_intermediate_size",
                  {0, nullptr},
                  "there are no shared experts here"});
  if (type == "mixtral") {
    keys.push_back({"router_jitter_noise", {0}, "routers have no noise here"});
    keys.push_back({"norm_topk_prob", {true}, "a mixtral divides by the sum"});
  }
  return keys;
}

std::vector<std::string> keys_read(const Family& family) {
  std::vector<std::string> keys = config_keys::words_of(R"(
model_type architectures vocab_size num_key_value_heads head_dim rms_norm_eps
initializer_range tie_word_embeddings attention_dropout rope_theta rope_scaling
rope_parameters original_max_position_embeddings layer_types sliding_window
use_sliding_window qkv_bias use_qk_norm max_window_layers)");
  const auto add = [&](bool holds, const std::vector<std::string>& more) {
    if (holds) keys.insert(keys.end(), more.begin(), more.end());
  };
  add(family.has_attention_bias, {"attention_bias"});
  add(family.has_mlp_bias, {"mlp_bias"});
  add(family.experts > 0,
      {"num_experts", "num_local_experts", "num_experts_per_tok",
       "router_aux_loss_coef", "output_router_logits"});
  add(std::string(family.type) == "qwen3_moe",
      {"norm_topk_prob", "moe_intermediate_size", "decoder_sparse_step",
       "mlp_only_layers"});
  return keys;
}

}  // namespace llama_families

const std::vector<std::string>& llama_types() {
  static const std::vector<std::string> kTypes = [] {
    std::vector<std::string> types;
    for (const auto& family : llama_families::kFamilies) {
      types.push_back(family.type);
    }
    return types;
  }();
  return kTypes;
}

}  // namespace shardbook
