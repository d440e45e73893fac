// Whatever the text of a model's config is, reading it ends in a model that is
// written and read again alike, or in an Error that names the file and can be
// read; and so does counting it, in a count of which no part is negative.

#include "chapters/common/models/counted_model.h"
#include "chapters/common/models/models.h"
#include "tests/fuzz/fuzz.h"

namespace {

using shardbook::CountedModel;
using shardbook::kFuzzedInput;
using shardbook::Mask;
using shardbook::ModelConfig;
using shardbook::promise;

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data,
                                      std::size_t size) {
  const std::string text = shardbook::text_of(data, size);
  shardbook::read_or_refuse([&] {
    const ModelConfig config = ModelConfig::from_json(text, kFuzzedInput);
    const std::string written = config.to_json();
    promise(ModelConfig::from_json(written, kFuzzedInput).to_json() == written);
    promise(config.num_classes() > 0);
    if (config.is_image()) {
      promise(!config.depths.empty() && config.width > 0);
    } else if (config.is_llama()) {
      const shardbook::LlamaConfig& llama = config.llama;
      promise(config.n_layer > 0 && config.n_head % llama.kv_heads == 0);
      promise(llama.head_dim > 0 && llama.head_dim % 2 == 0);
      promise(llama.experts_per_token <= llama.num_experts);
      promise(shardbook::num_parameters(config) > 0);
    } else {
      promise(config.n_layer > 0 && config.n_embd % config.n_head == 0);
    }
  });
  shardbook::read_or_refuse([&] {
    const CountedModel model = CountedModel::from_json(text, kFuzzedInput);
    promise(model.positions > 0 && model.parameters() > 0);
    for (const auto& [group, count] : model.parts()) promise(count > 0);
    promise(model.active() > 0 && model.active() <= model.parameters());
    promise(model.active_in_blocks() >= 0);
    const auto seq = static_cast<double>(model.positions);
    const double full = model.operations(seq, Mask::kIgnored);
    promise(full > 0 && model.operations(seq, Mask::kCounted) <= full);
    promise(model.backward_operations(seq, Mask::kIgnored) <= 2 * full);
    promise(model.kv_bytes(seq, 2, true) <= model.kv_bytes(seq, 2, false) ||
            model.has_latent());
  });
  return 0;
}

std::vector<std::string> shardbook::fuzz_seeds() {
  return {"", "{}",
          R"({"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024,
          "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": 3072,
          "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
          "attn_pdrop": 0.1, "tie_word_embeddings": true})",
          R"({"model_type": "mlp", "n_embd": 64, "n_layer": 3, "n_head": 1,
          "n_ctx": 128, "n_inner": null})",
          R"({"model_type": "gpt2-with-experts", "hidden_size": 8,
          "num_attention_heads": 2, "n_layers": 2, "pruned_heads": {},
          "activation_function": "gelu", "initializer_range": 0.1})",
          R"({"model_type": "resnet", "hidden_sizes": [16, 32], "depths": [1,
          1], "embedding_size": 16, "id2label": {"0": "a"}, "hidden_act":
          "relu", "downsample_in_bottleneck": false})",
          R"({"model_type": "resnet", "depths": [3, 4, 6, 3], "layer_type":
          "bottleneck", "embedding_size": 64, "num_labels": 1000})",
          R"({"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": null,
          "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "rope_scaling":
          {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
          "attention_bias": true, "mlp_bias": true, "hidden_act": "silu"})",
          R"({"model_type": "mistral", "num_hidden_layers": 2,
          "rope_parameters": {"type": "linear", "factor": 2, "rope_theta": 7},
          "sliding_window": null, "tie_word_embeddings": true})",
          R"({"model_type": "qwen2", "hidden_size": 32, "num_hidden_layers": 2,
          "use_sliding_window": true, "max_window_layers": 1, "layer_types":
          ["full_attention", "sliding_attention"], "sliding_window": 16})",
          R"({"model_type": "qwen3_moe", "num_hidden_layers": 4,
          "num_experts": 8, "num_local_experts": 16, "norm_topk_prob": true,
          "num_experts_per_tok": 2, "decoder_sparse_step": 2,
          "mlp_only_layers": [1], "moe_intermediate_size": 24,
          "router_aux_loss_coef": 0, "output_router_logits": true})",
          R"({"model_type": "mixtral", "intermediate_size": 24,
          "num_experts": 8, "router_jitter_noise": 0.0})",
          // Counted alone
          R"({"model_type": "deepseek_v3", "num_hidden_layers": 4,
          "q_lora_rank": null, "kv_lora_rank": 16, "n_shared_experts": 2,
          "first_k_dense_replace": 1, "n_routed_experts": 8,
          "num_nextn_predict_layers": 1, "rope_scaling": {"type": "yarn"}})",
          R"({"model_type": "gemma3", "text_config": {"model_type":
          "gemma3_text", "num_hidden_layers": 2, "layer_types":
          ["sliding_attention", "full_attention"], "sliding_window": 16},
          "vision_config": {}, "tie_word_embeddings": true})",
          R"({"model_type": "gpt_neo", "num_layers": 4, "window_size": 8,
          "attention_types": [[["global", "local"], 2]]})",
          R"({"model_type": "falcon", "new_decoder_architecture": true,
          "num_kv_heads": 8, "num_attention_heads": 64, "hidden_size": 512,
          "num_ln_in_parallel_attn": null, "alibi": false, "bias": true})",
          R"({"model_type": "dbrx", "n_layers": 2, "attn_config":
          {"kv_n_heads": 8, "clip_qkv": 8}, "ffn_config": {"moe_top_k": 2}})",
          R"({"model_type": "llama4_text", "num_hidden_layers": 4,
          "no_rope_layers": [1, 1, 1, 0], "moe_layers": [1, 3],
          "attention_chunk_size": 64, "intermediate_size_mlp": 128})",
          R"({"model_type": "glm_moe_dsa", "num_hidden_layers": 2,
          "indexer_types": ["full", "shared"], "mlp_layer_types": ["dense",
          "sparse"], "index_topk": 64, "initializer_range": Infinity})",
          R"({"model_type": "gemma4_text", "num_hidden_layers": 4,
          "num_kv_shared_layers": 1, "use_double_wide_mlp": true,
          "layer_types": ["full_attention", "sliding_attention",
          "sliding_attention", "full_attention"], "enable_moe_block": true,
          "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8})",
          R"({"model_type": "mimo_v2_flash", "num_hidden_layers": 2,
          "sliding_window_size": 16, "hybrid_layer_pattern": [0, 1],
          "swa_num_key_value_heads": 8})",
          R"({"model_type": "gpt_oss", "num_hidden_layers": 2,
          "num_experts_per_tok": 4, "sliding_window": null})"};
}
