// The keys of a config.json whose effect is known.

#include "chapters/common/models/internal/config_keys.h"

namespace shardbook::config_keys {

using nlohmann::json;

namespace {

constexpr char kOwnKeys[] = "each head has keys and values of its own here";

}  // namespace

const std::vector<FixedKey>& fixed_of_gpt() {
  static const std::vector<FixedKey> kKeys = {
      {"tie_word_embeddings",
       {true},
       "the output layer has the weights of the token embedding here"},
      {"scale_attn_weights",
       {true},
       "scores are divided by the square root of a head's width here"},
      {"scale_attn_by_inverse_layer_idx",
       {false},
       "scores are not divided by the number of the layer here"},
      {"add_cross_attention", {false}, "there is no encoder to attend to"},
      {"pruned_heads", {json::object(), nullptr}, "all heads are kept here"},
      {"quantization_config", {nullptr}, "weights are floating here"},
      {"torchscript",
       {false},
       "transformers would give the output layer weights of its own"},
      {"is_encoder_decoder", {false}, "there is no encoder"},
      {"per_layer_config", {nullptr, json::object()}, "all layers are alike"},
      {"loss_type",
       {"ForCausalLM", nullptr},
       "the loss is the cross-entropy of the next token here"},
      {"auto_map", {nullptr}, "a model with code of its own is not run here"},
      {"n_special", {0}, "all tokens are counted by vocab_size"},
      // Of other programs that write model_type gpt2, or no type at all
      {"bias", {true}, "linear layers and norms have biases here"},
      {"attention_head_type", {"multihead"}, kOwnKeys},
      {"multi_query", {false}, kOwnKeys},
      {"position_embedding_type",
       {"absolute", "learned_absolute"},
       "positions are learned vectors here"},
      {"normalize_attention_scores",
       {true},
       "scores are divided by the square root of a head's width here"}};
  return kKeys;
}

const std::vector<std::string>& harmless_in_gpt() {
  static const std::vector<std::string> kKeys = {
      "summary_type",
      "summary_use_proj",
      "summary_activation",
      "summary_proj_to_labels",
      "summary_first_dropout",
      "summary_last_dropout",
      "classifier_dropout",
      "predict_special_tokens",
      "reorder_and_upcast_attn",
      "apply_query_key_layer_scaling"};
  return kKeys;
}

const std::vector<FixedKey>& fixed_of_resnet() {
  static const std::vector<FixedKey> kKeys = {
      {"hidden_act", {"relu"}, "a ResNet has ReLU here"},
      {"num_channels", {3}, "images have 3 channels here"},
      {"downsample_in_first_stage",
       {false},
       "the first stage keeps height and width here"},
      {"problem_type",
       {nullptr, "single_label_classification"},
       "an image has one label here"},
      {"quantization_config", {nullptr}, "weights are floating here"}};
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
  static const std::vector<FixedKey> kKeys = {
      {"hidden_act", {"silu"}, "the MLPs have SiLU here"},
      {"partial_rotary_factor", {1, nullptr}, "whole heads turn here"},
      {"rope_interleaved",
       {false},
       "the halves of a head turn here, not pairs"},
      {"use_mrope", {false, nullptr}, "positions have one dimension here"},
      {"is_llama_config", {true}, "the model here is a Llama"},
      {"add_cross_attention", {false}, "there is no encoder to attend to"},
      {"pruned_heads", {json::object(), nullptr}, "all heads are kept here"},
      {"quantization_config", {nullptr}, "weights are floating here"},
      {"torchscript",
       {false},
       "transformers would give the output layer weights of its own"},
      {"is_encoder_decoder", {false}, "there is no encoder"},
      {"per_layer_config", {nullptr, json::object()}, "all layers are alike"},
      {"loss_type",
       {"ForCausalLM", nullptr},
       "the loss is the cross-entropy of the next token here"},
      {"auto_map", {nullptr}, "a model with code of its own is not run here"}};
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
  static const std::vector<std::string> kKeys = {
      "bad_words_ids",
      "begin_suppress_tokens",
      "cache_implementation",
      "constraints",
      "decoder_start_token_id",
      "diversity_penalty",
      "do_sample",
      "early_stopping",
      "encoder_no_repeat_ngram_size",
      "encoder_repetition_penalty",
      "epsilon_cutoff",
      "eta_cutoff",
      "exponential_decay_length_penalty",
      "force_words_ids",
      "forced_bos_token_id",
      "forced_eos_token_id",
      "guidance_scale",
      "length_penalty",
      "low_memory",
      "max_length",
      "max_new_tokens",
      "max_time",
      "min_length",
      "min_new_tokens",
      "min_p",
      "no_repeat_ngram_size",
      "num_beam_groups",
      "num_beams",
      "num_return_sequences",
      "output_logits",
      "output_scores",
      "penalty_alpha",
      "remove_invalid_values",
      "renormalize_logits",
      "repetition_penalty",
      "return_dict_in_generate",
      "sequence_bias",
      "stop_strings",
      "suppress_tokens",
      "temperature",
      "top_k",
      "top_p",
      "typical_p"};
  return kKeys;
}

}  // namespace shardbook::config_keys
