// The keys of a config.json whose effect is known.

#include <iterator>
#include <sstream>

#include "chapters/common/models/internal/config_keys.h"
#include "chapters/common/models/internal/counted_families.h"

namespace shardbook::config_keys {

using nlohmann::json;

namespace {

constexpr char kOwnKeys[] = "each head has keys and values of its own here";

FixedKey fixed(const char* key, const std::vector<json>& values,
               const char* reason) {
  return {key, values, reason};
}

using Keys = std::vector<FixedKey>;

// What all language models have, behind some keys and before others.
Keys with_text_keys(Keys keys, const Keys& behind = {}) {
  const Keys of_text = {
      fixed("add_cross_attention", {false}, "there is no encoder to attend to"),
      fixed("pruned_heads", {json::object(), nullptr},
            "all heads are kept here"),
      fixed("quantization_config", {nullptr}, "weights are floating here"),
      fixed("torchscript", {false},
            "transformers would give the output layer weights of its own"),
      fixed("is_encoder_decoder", {false}, "there is no encoder"),
      fixed("per_layer_config", {nullptr, json::object()},
            "all layers are alike"),
      fixed("loss_type", {"ForCausalLM", nullptr},
            "the loss is the cross-entropy of the next token here"),
      fixed("auto_map", {nullptr},
            "a model with code of its own is not run here")};
  keys.insert(keys.end(), of_text.begin(), of_text.end());
  keys.insert(keys.end(), behind.begin(), behind.end());
  return keys;
}

}  // namespace

std::vector<std::string> words_of(const std::string& text) {
  std::istringstream stream(text);
  return {std::istream_iterator<std::string>(stream), {}};
}

const std::vector<FixedKey>& fixed_of_gpt() {
  static const Keys kKeys = with_text_keys(
      {fixed("tie_word_embeddings", {true},
             "the output layer has the weights of the token embedding here"),
       fixed("scale_attn_weights", {true},
             "scores are divided by the square root of a head's width here"),
       fixed("scale_attn_by_inverse_layer_idx", {false},
             "scores are not divided by the number of the layer here")},
      {fixed("n_special", {0}, "all tokens are counted by vocab_size"),
       // Of other programs that write model_type gpt2, or no type at all
       fixed("bias", {true}, "linear layers and norms have biases here"),
       fixed("attention_head_type", {"multihead"}, kOwnKeys),
       fixed("multi_query", {false}, kOwnKeys),
       fixed("position_embedding_type", {"absolute", "learned_absolute"},
             "positions are learned vectors here"),
       fixed("normalize_attention_scores", {true},
             "scores are divided by the square root of a head's width here")});
  return kKeys;
}

const std::vector<std::string>& harmless_in_gpt() {
  static const std::vector<std::string> kKeys = words_of(R"(
summary_type summary_use_proj summary_activation summary_proj_to_labels
summary_first_dropout summary_last_dropout classifier_dropout
predict_special_tokens reorder_and_upcast_attn apply_query_key_layer_scaling)");
  return kKeys;
}

const std::vector<FixedKey>& fixed_of_resnet() {
  static const Keys kKeys = {
      fixed("hidden_act", {"relu"}, "a ResNet has ReLU here"),
      fixed("num_channels", {3}, "images have 3 channels here"),
      fixed("downsample_in_first_stage", {false},
            "the first stage keeps height and width here"),
      fixed("problem_type", {nullptr, "single_label_classification"},
            "an image has one label here"),
      fixed("quantization_config", {nullptr}, "weights are floating here")};
  return kKeys;
}

const std::vector<std::string>& harmless_in_resnet() {
  static const std::vector<std::string> kKeys = {
      "out_features", "out_indices", "stage_names",
      // Of language models only
      "add_cross_attention", "is_encoder_decoder", "pruned_heads",
      "tie_word_embeddings", "torchscript"};
  return kKeys;
}

const std::vector<FixedKey>& fixed_of_llama() {
  static const Keys kKeys = with_text_keys(
      {fixed("hidden_act", {"silu"}, "the MLPs have SiLU here"),
       fixed("partial_rotary_factor", {1, nullptr}, "whole heads turn here"),
       fixed("rope_interleaved", {false},
             "the halves of a head turn here, not pairs"),
       fixed("use_mrope", {false, nullptr},
             "positions have one dimension here"),
       fixed("is_llama_config", {true}, "the model here is a Llama")});
  return kKeys;
}

const std::vector<std::string>& harmless_in_llama() {
  static const std::vector<std::string> kKeys = {
      "pretraining_tp", "max_sequence_length", "transformers.js_config",
      "unsloth_fixed", "classifier_dropout"};
  return kKeys;
}

const std::vector<std::string>& keys_without_effect() {
  static const std::vector<std::string> kKeys = {
      "attn_implementation", "chunk_size_feed_forward",
      "cross_attention_hidden_size", "dtype", "experts_implementation",
      "finetuning_task", "gradient_checkpointing", "id2label", "is_decoder",
      "label2id", "name_or_path", "num_labels", "output_attentions",
      "output_hidden_states", "output_past", "prefix", "problem_type",
      "return_dict", "task_specific_params", "tf_legacy_loss",
      "tie_encoder_decoder", "tie_last_hidden_states", "tokenizer_class",
      "torch_dtype", "transformers_version", "use_bfloat16", "use_cache",
      "xla_device",
      // Tokens with a meaning
      "bos_token_id", "cls_token_id", "eos_token_id", "eos_token_ids",
      "mask_token_id", "pad_token_id", "sep_token_id", "unk_token_id"};
  return kKeys;
}

const std::vector<std::string>& keys_of_generation() {
  static const std::vector<std::string> kKeys = words_of(R"(
bad_words_ids begin_suppress_tokens cache_implementation constraints
decoder_start_token_id diversity_penalty do_sample early_stopping
encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff
eta_cutoff exponential_decay_length_penalty force_words_ids forced_bos_token_id
forced_eos_token_id guidance_scale length_penalty low_memory max_length
max_new_tokens max_time min_length min_new_tokens min_p no_repeat_ngram_size
num_beam_groups num_beams num_return_sequences output_logits output_scores
penalty_alpha remove_invalid_values renormalize_logits repetition_penalty
return_dict_in_generate sequence_bias stop_strings suppress_tokens temperature
top_k top_p typical_p)");
  return kKeys;
}

}  // namespace shardbook::config_keys

namespace shardbook::counted_families {

using config_keys::words_of;

const std::vector<std::string>& keys_passed_over() {
  static const std::vector<std::string> kKeys = words_of(R"(
activation activation_dropout activation_function alibi
apply_residual_connection_post_layernorm attention_dropout attention_layers
attention_multiplier attention_probs_dropout_prob attention_softmax_in_fp32
attn_config.alibi attn_config.alibi_bias_max attn_config.attn_impl
attn_config.attn_pdrop attn_config.attn_uses_sequence_id attn_config.clip_qkv
attn_config.model_type attn_config.prefix_lm attn_config.rope_theta
attn_config.softmax_scale attn_logit_softcapping attn_pdrop attn_scale
attn_temperature_tuning attention_value_scale aux_loss_alpha bias_dropout_fusion clip_qkv dropout
emb_init_std emb_init_uniform_lim emb_pdrop embd_pdrop embed_dropout
embedding_dropout embedding_fraction embedding_multiplier eod_token_id ep_size
experts_per_token fan_mode ffn_config.ffn_act_fn ffn_config.hidden_size
ffn_config.model_type ffn_config.moe_jitter_eps ffn_config.moe_loss_weight
ffn_config.moe_normalize_expert_weights ffn_config.uniform_expert_assignment
final_logit_softcapping floor_scale for_llm_compressor hidden_activation
hidden_dropout hidden_dropout_prob image_token_id index_share_for_mtp_iteration indexer_rope_interleave
inference_runner init_config
init_device init_gain init_nonlinearity init_std initial_context_length
initializer_range input_jitter_noise layer_norm_eps layer_norm_epsilon
layerdrop layernorm_epsilon learned_pos_emb logit_scale logits_scaling low_precision_layernorm
masked_softmax_fusion max_batch_size moe_norm_min moe_router_dtype mtp_transformer_layers n_ctx n_group norm_eps
norm_epsilon norm_topk_prob norm_type num_mtp_layers num_mtp_modules
num_nextn_predict_layers
offset_alibi order_of_interleaved_layers output_router_logits pad_key_length
param_init_fn position_embedding_type pre_allocate_kv_cache pretraining_tp
qk_head_dim query_pre_attn_scalar resid_dropout resid_pdrop residual_dropout
residual_multiplier rms_norm_eps routed_scaling_factor router_aux_loss_coef
router_jitter_noise router_z_loss_coef scale_attention_softmax_in_fp32
scale_attn_by_inverse_layer_idx scale_attn_weights scoring_func seq_aux
skip_bias_add skip_bias_add_qkv slow_but_exact swa_rope_theta swiglu_alpha swiglu_limit
tokenizer_name topk_group topk_method use_embedding_sharing
use_gated_activation use_mtp use_pad_tok_in_ffn use_parallel_block
use_parallel_embedding use_routing_bias validate_runner_input verbose video_token_id
vision_end_token_id vision_start_token_id vision_token_id z_loss)");
  return kKeys;
}

const std::vector<std::string>& keys_of_training() {
  static const std::vector<std::string> kKeys = words_of(R"(
architectures auto_map hidden_act loss_type mrope_section
original_max_position_embeddings partial_rotary_factor pruned_heads
quantization_config rope_interleave rope_interleaved rope_local_base_freq
rope_parameters rope_pct rope_scaling rope_theta rotary rotary_dim
rotary_emb_base rotary_pct torchscript use_mrope)");
  return kKeys;
}

}  // namespace shardbook::counted_families
