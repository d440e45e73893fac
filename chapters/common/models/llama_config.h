#pragma once

// What a model of the Llama family has and GPT-2 has not: Llama, Mistral, Qwen2,
// Qwen3, and with experts Mixtral and Qwen3-MoE; and what is planned alone, such
// as DeepSeek-V3 (ModelConfig::is_planned). ModelConfig (models.h) has the
// sizes that both have:
//
//   vocab_size   n_positions   n_embd (hidden)   n_layer (blocks)
//   n_head (query heads)   layer_norm_epsilon (of RMSNorm)   initializer_range
//
// `type` is Hugging Face's model_type.

#include <cstdint>
#include <string>
#include <vector>

#include "core/rope.h"

namespace shardbook {

struct ModelConfig;

struct LlamaConfig {
  /// Heads of keys and values; they divide the query heads.
  std::int64_t kv_heads = 1;
  /// Width of a head of queries. Query heads times this may differ from the hidden
  /// size.
  std::int64_t head_dim = 16;
  /// Width of a dense MLP, and of Mixtral's experts.
  std::int64_t intermediate_size = 64;
  double rope_theta = 10000;
  RopeScaling rope;
  /// The output layer has the weights of the token embedding.
  bool tied = false;
  bool qkv_bias = false, o_bias = false, mlp_bias = false;
  /// RMSNorm over each head of q and k, before they turn.
  bool qk_norm = false;
  /// Latent attention (block.h), whose heads of queries have `rope_dim` columns
  /// that turn and values `value_dim`. 0: other attention.
  std::int64_t kv_rank = 0;
  std::int64_t q_rank = 0, rope_dim = 0, value_dim = 0;
  /// A token sees this many, with itself, in the blocks `sliding_blocks`; 0: all.
  std::int64_t sliding_window = 0;
  std::vector<std::int64_t> sliding_blocks;
  /// 0: dense.
  std::int64_t num_experts = 0;
  std::int64_t experts_per_token = 0;
  /// Width of an expert.
  std::int64_t moe_intermediate_size = 0;
  /// Width of the MLP beside the experts; 0: none.
  std::int64_t shared_intermediate_size = 0;
  /// The chosen probabilities are divided by their sum.
  bool norm_topk_prob = false;
  double router_aux_loss_coef = 0;
  /// The balancing loss is added to the loss.
  bool output_router_logits = false;
  /// For each block: experts rather than a dense MLP. Empty where num_experts is
  /// 0.
  std::vector<bool> has_experts;

  bool is_latent() const { return kv_rank > 0; }
  /// Columns of a head that turn.
  std::int64_t rope_width() const { return is_latent() ? rope_dim : head_dim; }
  bool has_shared_expert_in(std::int64_t block) const {
    return shared_intermediate_size > 0 && has_experts_in(block);
  }
  bool has_experts_in(std::int64_t block) const {
    return num_experts > 0 && has_experts[static_cast<std::size_t>(block)];
  }
  /// Training adds the balancing loss (llama_experts.h).
  bool has_balancing_loss() const {
    return num_experts > 0 && output_router_logits && router_aux_loss_coef > 0;
  }
};

/// Parameters of a model of the Llama family; tied tables count once. Throws
/// Error for another model.
std::int64_t num_parameters(const ModelConfig& config);

/// Throws Error, which names the key, where a model of the Llama family cannot
/// train on sequences of `seq` tokens: it has fewer positions, or its sliding
/// window is smaller. Accepts other models.
void check_sequence(const ModelConfig& config, std::int64_t seq);

}  // namespace shardbook
