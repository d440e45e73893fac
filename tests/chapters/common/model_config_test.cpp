// Model configs: sizes, unsupported keys, misspelt keys.

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "chapters/common/models/models.h"
#include "tests/chapters/common/common_support.h"
#include "tests/support/errors.h"

namespace shardbook::common_test {
namespace {

namespace files = std::filesystem;

class ConfigFiles : public CommonFiles {};

TEST_F(ConfigFiles, AreRead) {
  const std::string file = write("c.json", tiny().to_json());
  EXPECT_EQ(ModelConfig::read(file).to_json(), tiny().to_json());
  files::create_directory(path("folder.json"));
  expect_error([&] { ModelConfig::read(path("folder.json")); },
               {"folder.json", "cannot be read"});
}

TEST(ModelConfig, SurvivesItsOwnJson) {
  ModelConfig config = tiny();
  config.layer_norm_epsilon = 1e-6;
  const ModelConfig again = ModelConfig::from_json(config.to_json(), "x");
  EXPECT_EQ(again.to_json(), config.to_json());
  EXPECT_EQ(again.n_embd, 8);
  EXPECT_EQ(again.layer_norm_epsilon, 1e-6);
  EXPECT_EQ(ModelConfig::from_json("{\"n_ctx\": 32}", "x").n_positions, 32);
}

TEST(ModelConfig, PublishedSizesHaveThePublishedParameters) {
  const std::vector<std::pair<std::string, std::int64_t>> published = {
      {"gpt2", 124439808},
      {"gpt2-medium", 354823168},
      {"gpt2-large", 774030080},
      {"gpt2-xl", 1557611200}};
  InitOptions init;
  init.device = Device::meta();
  for (const auto& [name, parameters] : published) {
    EXPECT_EQ(make_model(ModelConfig::read(name), init)->num_parameters(),
              parameters)
        << name;
  }
}

TEST(ModelConfig, BadOnesAreRefusedWithASentence) {
  auto refuse = [](const std::string& json,
                   const std::vector<std::string>& parts) {
    SCOPED_TRACE(json);
    expect_error([&] { ModelConfig::from_json(json, "c.json"); }, parts);
  };
  refuse("", {"c.json", "not JSON"});
  refuse("{\"n_embd\": 4", {"not JSON"});
  refuse("[1]", {"not a JSON object"});
  refuse("{\"n_embd\": 0}", {"\"n_embd\" is 0", "positive integer"});
  refuse("{\"n_embd\": -4}", {"\"n_embd\" is -4"});
  refuse("{\"n_embd\": 1.5}", {"\"n_embd\" is 1.5"});
  refuse("{\"n_embd\": \"64\"}", {"\"n_embd\""});
  refuse("{\"n_layer\": 99999999999}", {"\"n_layer\""});
  refuse("{\"n_layer\": null}", {"\"n_layer\" is null"});
  refuse("{\"n_embd\": 10, \"n_head\": 4}", {"n_embd 10", "n_head 4"});
  refuse("{\"model_type\": \"gptj\"}", {"gptj", "gpt2", "llama"});
  refuse("{\"model_type\": 3}", {"\"model_type\" is 3"});
  refuse("{\"activation_function\": \"relu\"}", {"relu", "gelu_new", "gelu"});
  refuse("{\"n_inner\": 7}", {"\"n_inner\" is 7"});
  refuse("{\"layer_norm_epsilon\": -1}", {"\"layer_norm_epsilon\" is -1"});
  refuse("{\"resid_pdrop\": 1}", {"\"resid_pdrop\" is 1"});
  refuse("{\"n_embd\": \"\xff\"}", {"UTF-8"});
  refuse("{\"n_embd\": " + std::string(65, '[') + std::string(65, ']') + "}",
         {"nested more than 64 deep"});
  refuse("{\"n_embd\": \"" + std::string(5000, 'x') + "\"}",
         {"\"n_embd\" is \"" + std::string(36, 'x') + "...;"});
  expect_error([] { ModelConfig::read("gpt-huge"); },
               {"--model gpt-huge", "gpt-nano", "FILE.json"});
  expect_error([] { ModelConfig::read("none.json"); },
               {"none.json", "cannot be read"});
}

std::string refusal(const std::string& json) {
  return error_of([&] { ModelConfig::from_json(json, "c.json"); });
}

// A list of what is not quantized made a released one 3 MB long.
TEST(ModelConfig, AsLongAsReleasedOnesTheyAreReadAndLongerRefused) {
  const std::string begin = R"({"n_embd": 48, "n_head": 4, "problem_type": ")";
  const std::string three_mb = begin + std::string(3 << 20, 'x') + "\"}";
  EXPECT_EQ(ModelConfig::from_json(three_mb, "c.json").n_embd, 48);
  expect_text(refusal(begin + std::string(8 << 20, 'x') + "\"}"),
              {"c.json: longer than 8 MiB"});
  std::string keys = "{\"n_embd\": 4";
  for (int i = 0; i < 1000; ++i) keys += ", \"" + std::to_string(i) + "\": 1";
  expect_text(refusal(keys + "}"), {"has 1001 keys", "at most 1000"});
}

// Released configs have them, and Python writes and reads them.
TEST(ModelConfig, PythonsInfinityAndNaNAreValuesThatNoSizeHas) {
  const std::string passed_over =
      R"({"n_embd": 4, "n_head": 2, "problem_type": [0.0, Infinity,-Infinity ,
      NaN, "Infinity \" NaN"], "prefix": NaN})";
  EXPECT_EQ(refusal(passed_over), "");
  expect_text(refusal(R"({"n_embd": Infinity})"),
              {"\"n_embd\" is \"Infinity\"", "positive integer"});
  for (const char* bad :
       {R"({Infinity: 1, "n_embd": 4})", R"({"n_embd": Infinit})",
        R"({"n_embd": 4Infinity})", R"({"n_embd": NaN NaN})"}) {
    expect_text(refusal(bad), {"not JSON"});
  }
  // Bytes are those of the file
  expect_text(refusal(R"({"prefix": NaN, "a": -Infinity, "b": ?})"),
              {"not JSON (byte 38)"});
}

// Each key's first value would change the model and is refused. Its second
// value is what the model computes here, so it is accepted. This catches a row
// that is lost from the table.
TEST(ModelConfig, KeysThatWouldChangeTheFunctionAreRefused) {
  const std::vector<std::array<std::string, 3>> keys = {
      {"tie_word_embeddings", "false", "true"},
      {"scale_attn_weights", "false", "true"},
      {"scale_attn_by_inverse_layer_idx", "true", "false"},
      {"add_cross_attention", "true", "false"},
      {"pruned_heads", R"({"0": [1]})", "{}"},
      {"quantization_config", R"({"bits": 4})", "null"},
      {"n_inner", "48", "32"},
      {"architectures", R"(["GPT2ForSequenceClassification"])",
       R"(["GPT2LMHeadModel"])"},
      {"architectures", R"(["GPT2LMHeadModel", "GPT2DoubleHeadsModel"])",
       R"(["GPT2Model"])"},
      {"architectures", R"("GPT2LMHeadModel")", "null"},
      {"torchscript", "true", "false"},
      {"is_encoder_decoder", "true", "false"},
      {"per_layer_config", R"({"0": {"n_head": 1}})", "null"},
      {"loss_type", R"("ForTokenClassification")", R"("ForCausalLM")"},
      {"auto_map", R"({"AutoModel": "modeling_x.X"})", "null"},
      {"n_special", "5", "0"},
      {"bias", "false", "true"},
      {"attention_head_type", R"("multiquery")", R"("multihead")"},
      {"multi_query", "true", "false"},
      {"position_embedding_type", R"("alibi")", R"("learned_absolute")"},
      {"normalize_attention_scores", "false", "true"},
      {"activation_function", R"("quick_gelu")", R"("gelu_pytorch_tanh")"}};
  for (const auto& [key, bad, good] : keys) {
    const std::string text = refusal(with_sizes("\"" + key + "\": " + bad));
    EXPECT_NE(text.find("c.json: \"" + key + "\" is "), std::string::npos)
        << key << ": " << text;
    EXPECT_EQ(refusal(with_sizes("\"" + key + "\": " + good)), "") << key;
  }
}

// A key whose effect is not known may change the model. Each of these does in
// another project's GPT.
TEST(ModelConfig, KeysThatNobodyKnowsAreRefusedByNameWithTheirValue) {
  for (const auto& [key, value] : std::map<std::string, std::string>{
           {"rope_theta", "10000"},
           {"rope_scaling", R"({"type":"yarn"})"},
           {"alibi", "true"},
           {"mup_width_scale", "0.1"},
           {"mup_output_alpha", "2.2"},
           {"num_key_value_heads", "1"},
           {"sliding_window", "256"},
           {"parallel_attn", "true"},
           {"use_rms_norm", "true"},
           {"rotary_dim", "null"},
           {"author", "\"me\""}}) {
    expect_text(refusal(with_sizes("\"" + key + "\": " + value)),
                {"c.json: \"" + key + "\" is " + value + ": not followed here",
                 "GPT-2 with learned positions", "remove"});
  }
  std::string many;
  for (int i = 0; i < 40; ++i) {
    many += ", \"unheard_of_" + std::to_string(i) + "\": 1";
  }
  const std::string text = refusal(with_sizes("\"bias\": true" + many));
  expect_text(text, {"\"unheard_of_0\" is 1", "and 35 more"});
  EXPECT_LT(text.size(), 500u);
}

// Published configs, in the form of each: which are read, and the first key by
// which the others are refused.
TEST(ModelConfig, PublishedGptsAreReadOrRefusedByTheirKey) {
  const std::string sizes =
      R"("n_positions": 128, "vocab_size": 257, "n_layer": 2, "n_head": 4,
         "n_embd": 64, "model_type": "gpt2", "initializer_range": 0.02,
         "layer_norm_epsilon": 1e-05, "attn_pdrop": 0.1, "embd_pdrop": 0.1,
         "resid_pdrop": 0.1, "architectures": ["GPT2LMHeadModel"])";
  const auto refusal_of = [&](const std::string& more) {
    return refusal("{" + sizes + (more.empty() ? "" : ", " + more) + "}");
  };
  for (const char* read :
       {// gpt2-xl: keys of early releases
        R"("n_ctx": 1024, "n_special": 0, "predict_special_tokens": true,
              "output_past": true, "summary_activation": null)",
        // distilgpt2
        R"("_num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id":
              {"LABEL_0": 0}, "task_specific_params": {"text-generation":
              {"do_sample": true, "max_length": 50}})",
        // DialoGPT
        R"("task_specific_params": {"conversational": {"max_length":
              1000}})",
        // GPT-SW3
        R"("activation_function": "gelu", "apply_query_key_layer_scaling":
              true, "normalize_attention_scores": true, "n_inner": 256,
              "pad_token_id": 0, "tokenizer_class": "GPTSw3Tokenizer")",
        // Cerebras-GPT
        R"("activation_function": "gelu", "n_inner": 256,
              "scale_attn_weights": true, "reorder_and_upcast_attn": false,
              "scale_attn_by_inverse_layer_idx": false, "use_cache": true,
              "torch_dtype": "float32", "transformers_version": "4.25.1")"}) {
    EXPECT_EQ(refusal_of(read), "") << read;
  }
  for (const auto& [more, part] : std::map<std::string, std::string>{
           // CodeParrot
           {R"("reorder_and_upcast_attn": true, "scale_attn_weights": true,
               "scale_attn_by_inverse_layer_idx": true)",
            "\"scale_attn_by_inverse_layer_idx\" is true"},
           // SantaCoder
           {R"("attention_head_type": "multiquery", "activation_function":
               "gelu_pytorch_tanh", "auto_map": {"AutoConfig": "c.C"})",
            "\"auto_map\" is {"},
           // BTLM, Jais
           {R"("mup_embeddings_scale": 14.6, "mup_scale_qk_dot_by_d": true)",
            "\"mup_embeddings_scale\" is 14.6, \"mup_scale_qk_dot_by_d\""}}) {
    expect_text(refusal_of(more), {part});
  }
  for (const char* type : {"biogpt", "gpt_bigcode", "gptj", "openai-gpt"}) {
    expect_text(
        refusal(std::string(R"({"n_embd": 8, "model_type": ")") + type + "\"}"),
        {type, "give \"gpt2\""});
  }
}

// The config.json of a GPT-2 as transformers writes it, and keys of its base
// class. Catches a guess that treats one of them as a misspelt key.
TEST(ModelConfig, AWholeConfigOfTransformersIsRead) {
  const std::string text = R"({
    "_name_or_path": "", "activation_function": "gelu_new",
    "add_cross_attention": false, "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1, "bad_words_ids": null, "begin_suppress_tokens": null,
    "bos_token_id": 50256, "chunk_size_feed_forward": 0,
    "cross_attention_hidden_size": null, "decoder_start_token_id": null,
    "diversity_penalty": 0.0, "do_sample": true, "dtype": "float32",
    "early_stopping": false, "embd_pdrop": 0.1, "eos_token_id": 50256,
    "exponential_decay_length_penalty": null, "finetuning_task": null,
    "forced_bos_token_id": null, "id2label": {"0": "LABEL_0"},
    "initializer_range": 0.02, "is_decoder": false,
    "is_encoder_decoder": false, "label2id": {"LABEL_0": 0},
    "layer_norm_epsilon": 1e-05, "length_penalty": 1.0, "max_length": 50,
    "min_length": 0, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768,
    "n_head": 12, "n_inner": null, "n_layer": 12, "n_positions": 1024,
    "encoder_no_repeat_ngram_size": 0, "forced_eos_token_id": null,
    "num_beam_groups": 1,
    "no_repeat_ngram_size": 0, "num_beams": 1, "num_labels": 1,
    "num_return_sequences": 1, "output_attentions": false,
    "output_hidden_states": false, "output_scores": false,
    "pad_token_id": null, "prefix": null, "problem_type": null,
    "pruned_heads": {}, "remove_invalid_values": false,
    "reorder_and_upcast_attn": true, "repetition_penalty": 1.0,
    "resid_pdrop": 0.1, "return_dict": true,
    "return_dict_in_generate": false,
    "scale_attn_by_inverse_layer_idx": false, "scale_attn_weights": true,
    "sep_token_id": null, "summary_activation": null,
    "summary_first_dropout": 0.1, "summary_proj_to_labels": true,
    "summary_type": "cls_index", "summary_use_proj": true,
    "suppress_tokens": null, "task_specific_params": {"text-generation":
    {"do_sample": true, "max_length": 50}}, "temperature": 1.0,
    "tf_legacy_loss": false, "tie_encoder_decoder": false,
    "tie_word_embeddings": true, "tokenizer_class": null, "top_k": 50,
    "top_p": 1.0, "torch_dtype": "float32", "torchscript": false,
    "transformers_version": "5.24.0", "typical_p": 1.0,
    "use_bfloat16": false, "use_cache": true, "vocab_size": 50257})";
  EXPECT_EQ(refusal(text), "");
  EXPECT_EQ(ModelConfig::from_json(text, "x").to_json(),
            ModelConfig::read("gpt2").to_json());
}

TEST(ModelConfig, SizesHaveASecondNameInTransformers) {
  const ModelConfig config = ModelConfig::from_json(
      R"({"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6,
          "max_position_embeddings": 32, "vocab_size": 77})",
      "x");
  EXPECT_EQ(config.n_embd, 48);
  EXPECT_EQ(config.n_layer, 3);
  EXPECT_EQ(config.n_head, 6);
  EXPECT_EQ(config.n_positions, 32);
  expect_error(
      [] {
        ModelConfig::from_json(R"({"n_embd": 8, "hidden_size": 16})", "x");
      },
      {"\"n_embd\" is 8", "\"hidden_size\"", "16"});
}

TEST(ModelConfig, MisspeltKeysAndConfigsWithoutASizeAreRefused) {
  expect_error(
      [] {
        ModelConfig::from_json(R"({"vocab_size": 50258, "context_length": 1024,
            "emb_dim": 768, "n_heads": 12, "n_layers": 12})",
                               "c.json");
      },
      {"c.json", "\"context_length\" (did you mean \"n_positions\"?)",
       "\"emb_dim\" (did you mean \"n_embd\"?)",
       "\"n_heads\" (did you mean \"n_head\"?)",
       "\"n_layers\" (did you mean \"n_layer\"?)",
       "n_positions, n_embd, n_layer, n_head"});
  for (const char* text : {"{}", R"({"vocab_size": 100, "depth": 3})",
                           R"({"model_type": "mlp"})"}) {
    EXPECT_NE(refusal(text).find("no size"), std::string::npos) << text;
  }
  for (const char* key :
       {"n_layers", "n_heads", "n_embed", "n_position", "vocab_sizes",
        "tie_word_embedding", "activation_functions", "block_size"}) {
    const std::string text =
        refusal(with_sizes(std::string("\"") + key + "\": 1"));
    EXPECT_NE(text.find("did you mean"), std::string::npos) << key << text;
  }
  // A remark
  EXPECT_EQ(refusal(with_sizes(R"("_n_layers": 3)")), "");
}

TEST(ModelConfig, WeightsBeginWithTheInitializersRange) {
  ModelConfig config = tiny();
  Gpt narrow(config, f64_init());
  config.initializer_range = 0.04;
  Gpt wide(config, f64_init());
  const auto a = narrow.named_parameters(), b = wide.named_parameters();
  for (std::size_t i = 0; i < a.size(); ++i) {
    const bool is_drawn = a[i].tensor.ndim() == 2;
    EXPECT_LT(
        max_abs_difference(b[i].tensor, scale(a[i].tensor, is_drawn ? 2 : 1)),
        1e-16)
        << a[i].name;
  }
}

// --- ResNets -----------------------------------------------------------------

// As transformers writes it: labels by name, and two labels by default.
TEST(ResNetConfig, OfTransformersIsRead) {
  const auto labels = [](const std::string& rest) {
    return ModelConfig::read(R"({"depths": [1, 2], "embedding_size": 4,
        "downsample_in_bottleneck": false, "downsample_in_first_stage": false,
        "hidden_act": "relu", "hidden_sizes": [16, 32],
        "layer_type": "bottleneck", "model_type": "resnet", "num_channels": 3,
        "out_features": ["stage2"], "out_indices": [2], "problem_type": null,
        "stage_names": ["stem", "stage1", "stage2"], "dtype": "float32",
        "is_encoder_decoder": false, "pruned_heads": {}, "torchscript": false,
        "add_cross_attention": false, "tie_word_embeddings": true,
        "architectures": ["ResNetForImageClassification"])" +
                             rest + "}")
        .num_labels;
  };
  EXPECT_EQ(labels(R"(, "id2label": {"0": "a", "1": "b", "2": "c"},
                      "label2id": {"a": 0, "b": 1, "c": 2},
                      "transformers_version": "5.24.0")"),
            3);
  EXPECT_EQ(labels(R"(, "transformers_version": "5.24.0")"), 2);
  EXPECT_EQ(labels(R"(, "num_labels": 9)"), 9);
}

TEST(ResNetConfig, KeysThatWouldChangeTheFunctionAreRefused) {
  const auto read = [](const std::string& rest) {
    return refusal(
        R"({"model_type": "resnet", "depths": [2, 2], "embedding_size": 16, )" +
        rest + "}");
  };
  const std::string bottleneck = R"("layer_type": "bottleneck", )";
  for (const auto& [rest, part] : std::map<std::string, std::string>{
           {R"("hidden_sizes": [24, 40])",
            "\"hidden_sizes\" is [24,40], but a stage is twice as wide as the "
            "one before it here; give [16,32]"},
           {bottleneck + R"("hidden_sizes": [16, 32])", "give [64,128]"},
           {R"("hidden_act": "gelu")", "\"hidden_act\" is \"gelu\""},
           {R"("num_channels": 1)", "\"num_channels\" is 1"},
           {R"("downsample_in_first_stage": true)",
            "\"downsample_in_first_stage\" is true"},
           {bottleneck + R"("downsample_in_bottleneck": true)",
            "\"downsample_in_bottleneck\" is true"},
           {R"("problem_type": "regression")", "\"problem_type\""},
           {R"("num_labels": 3, "id2label": {"0": "a"})", "\"id2label\" has 1"},
           {R"("hidden_size": [16, 32])", "did you mean \"hidden_sizes\"?"},
           {R"("architectures": ["RegNetModel"])", "\"architectures\" is"},
           {R"("stem_type": "deep")",
            "\"stem_type\" is \"deep\": not followed"},
           {R"("num_classes": 10)", "did you mean \"num_labels\"?"}}) {
    EXPECT_NE(read(rest).find(part), std::string::npos)
        << rest << ": " << read(rest);
  }
  // Two 3x3 convolutions have no bottleneck
  EXPECT_EQ(read(R"("downsample_in_bottleneck": true)"), "");
  const std::string text =
      refusal(R"({"model_type": "resnet", "num_labels": 3})");
  expect_text(text, {"no size"});
}

}  // namespace
}  // namespace shardbook::common_test
