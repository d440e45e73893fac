#pragma once

// A DeepSeek-V3 that is small enough to compute.

#include "chapters/common/models/models.h"

namespace shardbook {

/// h 48, 4 heads of 6 + 10 columns and values of 12, latent vectors of 20 and 14;
/// one dense block of 64, one of 8 experts of 24, of which a token visits 3, beside
/// a shared one of 32.
inline ModelConfig small_deepseek() {
  ModelConfig config;
  config.type = "deepseek_v3";
  config.is_planned = true;
  config.n_embd = 48, config.n_head = 4, config.n_layer = 2;
  LlamaConfig& llama = config.llama;
  llama.kv_heads = 4, llama.head_dim = 16, llama.intermediate_size = 64;
  llama.q_rank = 20, llama.kv_rank = 14, llama.rope_dim = 6;
  llama.value_dim = 12;
  llama.num_experts = 8, llama.experts_per_token = 3;
  llama.moe_intermediate_size = 24, llama.shared_intermediate_size = 32;
  llama.has_experts = {false, true};
  return config;
}

}  // namespace shardbook
