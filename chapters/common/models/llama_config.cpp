#include "chapters/common/models/llama_config.h"

#include <algorithm>

#include "chapters/common/models/block.h"
#include "chapters/common/models/internal/llama_json.h"
#include "chapters/common/models/models.h"
#include "core/check.h"

namespace shardbook {

bool ModelConfig::is_llama() const {
  if (is_planned) return true;
  const std::vector<std::string>& types = llama_types();
  return std::find(types.begin(), types.end(), type) != types.end();
}

std::int64_t num_parameters(const ModelConfig& config) {
  SB_CHECK(config.is_llama(), "num_parameters: a ", config.type,
           " is no model of the Llama family");
  const double tables = config.llama.tied ? 1 : 2;
  double total = tables * static_cast<double>(config.vocab_size) *
                     static_cast<double>(config.n_embd) +
                 block_table(config).norm_1.parameters();
  for (std::int64_t block = 0; block < config.n_layer; ++block) {
    for (const BlockPart& part : block_table(config, block).parts()) {
      total += part.parameters();
    }
  }
  return static_cast<std::int64_t>(total);
}

void check_sequence(const ModelConfig& config, std::int64_t seq) {
  if (!config.is_llama()) return;
  SB_CHECK(seq <= config.n_positions, "a ", config.type, ": ", seq,
           " tokens, and max_position_embeddings is ", config.n_positions);
  const std::int64_t window = config.llama.sliding_window;
  SB_CHECK(window == 0 || seq <= window, "a ", config.type, ": ", seq,
           " tokens, and sliding_window is ", window,
           "; attention sees all tokens here: give shorter sequences");
}

const std::map<std::string, std::string>& llama_presets() {
  static const std::map<std::string, std::string> kPresets = {
      // Of this book: as gpt-nano and gpt-micro
      {"llama-nano", R"({"model_type": "llama", "vocab_size": 256,
          "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
          "num_key_value_heads": 2, "intermediate_size": 176,
          "max_position_embeddings": 256, "rms_norm_eps": 1e-5})"},
      {"llama-micro", R"({"model_type": "llama", "vocab_size": 256,
          "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8,
          "num_key_value_heads": 2, "intermediate_size": 704,
          "max_position_embeddings": 256, "rms_norm_eps": 1e-5})"},
      // Released ones, by their config.json
      {"smollm2-135m", R"({"model_type": "llama", "vocab_size": 49152,
          "hidden_size": 576, "num_hidden_layers": 30,
          "num_attention_heads": 9, "num_key_value_heads": 3,
          "intermediate_size": 1536, "max_position_embeddings": 8192,
          "rms_norm_eps": 1e-5, "rope_theta": 100000,
          "initializer_range": 0.041666666666666664,
          "tie_word_embeddings": true})"},
      {"llama-3.2-1b", R"({"model_type": "llama", "vocab_size": 128256,
          "hidden_size": 2048, "num_hidden_layers": 16,
          "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
          "intermediate_size": 8192, "max_position_embeddings": 131072,
          "rms_norm_eps": 1e-5, "rope_theta": 500000, "rope_scaling":
          {"rope_type": "llama3", "factor": 32, "low_freq_factor": 1,
           "high_freq_factor": 4, "original_max_position_embeddings": 8192},
          "tie_word_embeddings": true})"},
      {"llama-2-7b", R"({"model_type": "llama", "vocab_size": 32000,
          "hidden_size": 4096, "num_hidden_layers": 32,
          "num_attention_heads": 32, "intermediate_size": 11008,
          "max_position_embeddings": 4096, "rms_norm_eps": 1e-5})"},
      {"llama-3.1-8b", R"({"model_type": "llama", "vocab_size": 128256,
          "hidden_size": 4096, "num_hidden_layers": 32,
          "num_attention_heads": 32, "num_key_value_heads": 8,
          "intermediate_size": 14336, "max_position_embeddings": 131072,
          "rms_norm_eps": 1e-5, "rope_theta": 500000, "rope_scaling":
          {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1,
           "high_freq_factor": 4, "original_max_position_embeddings": 8192}})"},
      {"llama-3.1-70b", R"({"model_type": "llama", "vocab_size": 128256,
          "hidden_size": 8192, "num_hidden_layers": 80,
          "num_attention_heads": 64, "num_key_value_heads": 8,
          "intermediate_size": 28672, "max_position_embeddings": 131072,
          "rms_norm_eps": 1e-5, "rope_theta": 500000, "rope_scaling":
          {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1,
           "high_freq_factor": 4, "original_max_position_embeddings": 8192}})"},
      {"llama-3.1-405b", R"({"model_type": "llama", "vocab_size": 128256,
          "hidden_size": 16384, "num_hidden_layers": 126,
          "num_attention_heads": 128, "num_key_value_heads": 8,
          "intermediate_size": 53248, "max_position_embeddings": 131072,
          "rms_norm_eps": 1e-5, "rope_theta": 500000, "rope_scaling":
          {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1,
           "high_freq_factor": 4, "original_max_position_embeddings": 8192}})"},
      {"mistral-7b", R"({"model_type": "mistral", "vocab_size": 32000,
          "hidden_size": 4096, "num_hidden_layers": 32,
          "num_attention_heads": 32, "num_key_value_heads": 8,
          "intermediate_size": 14336, "max_position_embeddings": 32768,
          "rms_norm_eps": 1e-5, "sliding_window": 4096})"},
      {"qwen2.5-0.5b", R"({"model_type": "qwen2", "vocab_size": 151936,
          "hidden_size": 896, "num_hidden_layers": 24,
          "num_attention_heads": 14, "num_key_value_heads": 2,
          "intermediate_size": 4864, "max_position_embeddings": 32768,
          "rms_norm_eps": 1e-6, "rope_theta": 1000000,
          "tie_word_embeddings": true})"},
      {"qwen3-0.6b", R"({"model_type": "qwen3", "vocab_size": 151936,
          "hidden_size": 1024, "num_hidden_layers": 28,
          "num_attention_heads": 16, "num_key_value_heads": 8,
          "head_dim": 128, "intermediate_size": 3072,
          "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
          "rope_theta": 1000000, "tie_word_embeddings": true})"},
      {"mixtral-8x7b", R"({"model_type": "mixtral", "vocab_size": 32000,
          "hidden_size": 4096, "num_hidden_layers": 32,
          "num_attention_heads": 32, "num_key_value_heads": 8,
          "intermediate_size": 14336, "num_local_experts": 8,
          "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02,
          "max_position_embeddings": 32768, "rms_norm_eps": 1e-5,
          "rope_theta": 1000000})"},
      {"qwen3-30b-a3b", R"({"model_type": "qwen3_moe", "vocab_size": 151936,
          "hidden_size": 2048, "num_hidden_layers": 48,
          "num_attention_heads": 32, "num_key_value_heads": 4,
          "head_dim": 128, "intermediate_size": 6144,
          "moe_intermediate_size": 768, "num_experts": 128,
          "num_experts_per_tok": 8, "norm_topk_prob": true,
          "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
          "rope_theta": 1000000})"}};
  return kPresets;
}

}  // namespace shardbook
