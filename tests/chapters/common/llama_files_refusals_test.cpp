// Weights of the Llama family in several files, and what is refused of files.

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "chapters/common/models/checkpoint.h"
#include "chapters/common/models/models.h"
#include "core/safetensors.h"
#include "core/shards.h"
#include "tests/chapters/common/llama_weights.h"
#include "tests/support/errors.h"

namespace shardbook::common_test {
namespace {

namespace files = std::filesystem;

// --- Several files -----------------------------------------------------------

class LlamaShards : public LlamaFiles {
 protected:
  /// Two shards and their manifest, which cut between q_proj and k_proj.
  void write_shards() const {
    std::vector<NamedTensor> tensors = tensors_in(golden_weights("llama_gqa"));
    std::vector<NamedTensor> shards[2];
    nlohmann::json map;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const std::string file =
          safetensors_shard_name("model", static_cast<int>(i % 2), 2);
      shards[i % 2].push_back(tensors[i]);
      map[tensors[i].name] = file;
    }
    for (int i = 0; i < 2; ++i) {
      save_tensors(path(safetensors_shard_name("model", i, 2)), shards[i]);
    }
    write("model.safetensors.index.json",
          nlohmann::json{{"metadata", {}}, {"weight_map", map}}.dump());
  }
};

TEST_F(LlamaShards, AreReadAsOneFile) {
  write_shards();
  const ModelConfig config = golden_config("llama_gqa");
  Weights expected(config);
  load_model(golden_weights("llama_gqa"), expected, config);
  for (const std::string& file :
       {path(""), path("model"), path("model.safetensors.index.json")}) {
    Weights model(config);
    load_model(file, model, config);
    for (const NamedTensor& each : expected.tensors()) {
      EXPECT_TRUE(bitwise_equal(each.tensor, model.at(each.name)));
    }
  }
}

// transformers takes the one file, which may be an older model.
TEST_F(LlamaShards, BesideOneFileAreRefused) {
  write_shards();
  files::copy_file(golden_weights("llama_gqa"), path("model.safetensors"));
  const ModelConfig config = golden_config("llama_gqa");
  Weights model(config);
  for (const std::string& folder : {path(""), path("model")}) {
    expect_error([&] { load_model(folder, model, config); },
                 {"--load", "model.safetensors, which transformers would take",
                  "model.safetensors.index.json"});
  }
  load_model(path("model.safetensors"), model, config);
  load_model(path("model.safetensors.index.json"), model, config);
}

// --- Refusals ----------------------------------------------------------------

TEST_F(LlamaFiles, AnOutputLayerOfATiedModelMustEqualTheTable) {
  const std::string name = "llama_tied_llama3_rope";
  const ModelConfig config = golden_config(name);
  Weights model(config);
  for (const double change : {0.0, 1.0}) {
    const std::string file = changed(name, [&](auto& tensors) {
      for (std::size_t i = 0; i < tensors.size(); ++i) {
        if (tensors[i].name != "model.embed_tokens.weight") continue;
        const Tensor head = tensors[i].tensor.clone();
        head.template data<float>()[5] += static_cast<float>(change);
        tensors.push_back({"lm_head.weight", head});
        break;
      }
    });
    if (change == 0) {
      load_model(file, model, config);
    } else {
      expect_error([&] { load_model(file, model, config); },
                   {"--load",
                    "'lm_head.weight' differs from "
                    "'model.embed_tokens.weight'"});
    }
  }
  // An untied model needs one
  ModelConfig untied = config;
  untied.llama.tied = false;
  Weights with_head(untied);
  expect_error([&] { load_model(golden_weights(name), with_head, untied); },
               {"no tensor is named 'lm_head.weight'"});
}

TEST_F(LlamaFiles, WeightsThatTheModelWouldDropAreRefused) {
  const auto expect_refused = [&](const std::string& file_of,
                                  const ModelConfig& config,
                                  const std::string& weight) {
    Weights model(config);
    const Tensor before = model.tensors()[0].tensor.clone();
    expect_error([&] { load_model(golden_weights(file_of), model, config); },
                 {"--load", "'" + weight + "' is in the file", config.type});
    EXPECT_TRUE(bitwise_equal(model.tensors()[0].tensor, before));
  };
  ModelConfig config = golden_config("llama_biases");
  config.llama.mlp_bias = false;
  expect_refused("llama_biases", config, "model.layers.0.mlp.down_proj.bias");
  config = golden_config("llama_gqa");
  config.n_layer = 1;
  expect_refused("llama_gqa", config, "model.layers.1.input_layernorm.weight");
  config = golden_config("mixtral_top2");
  config.llama.num_experts = 3;
  expect_refused("mixtral_top2", config,
                 "model.layers.0.block_sparse_moe.experts.3.w1.weight");
  config = golden_config("qwen3_qk_norm");
  config.llama.qk_norm = false;
  expect_refused("qwen3_qk_norm", config,
                 "model.layers.0.self_attn.k_norm.weight");
  // Without the name of the whole, too
  config = golden_config("qwen2_bias_tied");
  config.llama.qkv_bias = false;
  Weights model(config);
  const std::string bare = changed("qwen2_bias_tied", [](auto& tensors) {
    for (NamedTensor& each : tensors) each.name = each.name.substr(6);
  });
  expect_error([&] { load_model(bare, model, config); }, {"k_proj.bias'"});
  // A constant is no weight
  config = golden_config("llama_gqa");
  Weights plain(config);
  load_model(changed("llama_gqa",
                     [](auto& tensors) {
                       tensors.push_back(
                           {"model.layers.0.self_attn.rotary_emb.inv_freq",
                            Tensor::zeros({4}, {DType::kF32, Device()})});
                     }),
             plain, config);
}

TEST_F(LlamaFiles, ThatDoNotFitAreRefusedAndChangeNothing) {
  ModelConfig config = golden_config("llama_gqa");
  config.llama.kv_heads = 4;
  Weights model(config);
  const auto refused = [&](const std::string& file,
                           const std::vector<std::string>& parts) {
    expect_error([&] { load_model(file, model, config); }, parts);
    for (const NamedTensor& each : model.tensors()) {
      EXPECT_EQ(
          max_abs_difference(each.tensor, Tensor::zeros(each.tensor.shape(),
                                                        each.tensor.options())),
          0);
    }
  };
  refused(golden_weights("llama_gqa"),
          {"'model.layers.0.self_attn.k_proj.weight'", "[16, 32]", "[32, 32]"});
  config = golden_config("llama_gqa");
  refused(
      golden_weights("llama_gqa"),
      {"'model.layers.0.self_attn.qkv_proj.weight'", "[32, 96]", "[32, 64]"});
  model = Weights(config);
  refused(changed("llama_gqa",
                  [](auto& tensors) {
                    tensors.erase(
                        std::remove_if(tensors.begin(), tensors.end(),
                                       [](const NamedTensor& each) {
                                         return each.name ==
                                                "model.layers.1.mlp.up_proj."
                                                "weight";
                                       }),
                        tensors.end());
                  }),
          {"no tensor is named 'model.layers.1.mlp.up_proj.weight'"});
  refused(changed("llama_gqa",
                  [](auto& tensors) {
                    for (NamedTensor& each : tensors) {
                      if (each.name != "model.layers.1.mlp.up_proj.weight") {
                        continue;
                      }
                      each.tensor = Tensor::zeros(each.tensor.shape(),
                                                  {DType::kI64, Device()});
                    }
                  }),
          {"'model.layers.1.mlp.up_proj.weight'", "I64", "BF16"});
}

// No shape shows these.
TEST_F(LlamaFiles, TheirConfigMustComputeTheSame) {
  const ModelConfig config = golden_config("mixtral_top2");
  Weights model(config);
  save_model(path("m.safetensors"), model, config);
  const auto expect_differs = [&](const std::string& key, auto change) {
    ModelConfig other = config;
    change(other);
    expect_error([&] { check_config_of_file(path("m.safetensors"), other); },
                 {"--load", "\"" + key + "\" is ", "of --model"});
  };
  expect_differs("rope_theta",
                 [](ModelConfig& c) { c.llama.rope_theta = 10000; });
  expect_differs("rms_norm_eps",
                 [](ModelConfig& c) { c.layer_norm_epsilon = 1e-6; });
  expect_differs("num_attention_heads", [](ModelConfig& c) { c.n_head = 8; });
  expect_differs("num_key_value_heads",
                 [](ModelConfig& c) { c.llama.kv_heads = 4; });
  expect_differs("head_dim", [](ModelConfig& c) { c.llama.head_dim = 4; });
  expect_differs("sliding_window",
                 [](ModelConfig& c) { c.llama.sliding_window = 4; });
  expect_differs("num_experts_per_tok",
                 [](ModelConfig& c) { c.llama.experts_per_token = 1; });
  expect_differs("norm_topk_prob",
                 [](ModelConfig& c) { c.llama.norm_topk_prob = false; });
  expect_differs("rope_scaling", [](ModelConfig& c) {
    c.llama.rope.kind = RopeScaling::Kind::kLinear;
  });
  // Another name of the same model
  ModelConfig llama = golden_config("llama_gqa"), mistral = llama;
  mistral.type = "mistral";
  Weights small(llama);
  save_model(path("l.safetensors"), small, llama);
  check_config_of_file(path("l.safetensors"), mistral);
}

}  // namespace
}  // namespace shardbook::common_test
