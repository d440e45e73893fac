// Weights of the Llama family: files of transformers, joined in memory, and
// written apart again.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "chapters/common/models/checkpoint.h"
#include "chapters/common/models/internal/llama_files.h"
#include "chapters/common/models/models.h"
#include "core/layers.h"
#include "core/ops.h"
#include "core/safetensors.h"
#include "core/shards.h"
#include "tests/chapters/common/common_support.h"
#include "tests/chapters/common/llama_support.h"
#include "tests/support/errors.h"

namespace shardbook::common_test {
namespace {

namespace files = std::filesystem;

/// Weights without layers: zeros, under the names of a model in memory.
class Weights : public ModuleOf<Weights> {
 public:
  explicit Weights(const ModelConfig& config, DType dtype = DType::kF32,
                   const PartOf& part_of = {}) {
    for (const TensorInFiles& weight : llama_weights(config)) {
      const PartOfFile part = part_of ? part_of(weight.name) : PartOfFile{};
      Shape whole = weight.shape;
      if (part.rows > 0) whole[0] = part.rows;
      tensors_.push_back(
          {weight.name,
           Tensor::zeros(shape_of(part.shards, whole), {dtype, Device()})});
    }
  }
  Tensor forward(const Tensor& x) override { return x; }
  void members(MemberVisitor& visit) override {
    for (NamedTensor& each : tensors_) visit.parameter(each.name, each.tensor);
  }
  std::string type_name() const override { return "Weights"; }

  Tensor& at(const std::string& name) {
    const auto found = std::find_if(
        tensors_.begin(), tensors_.end(),
        [&](const NamedTensor& each) { return each.name == name; });
    SB_CHECK(found != tensors_.end(), "no ", name);
    return found->tensor;
  }
  void remove(const std::string& name) {
    tensors_.erase(
        std::remove_if(tensors_.begin(), tensors_.end(),
                       [&](const NamedTensor& e) { return e.name == name; }),
        tensors_.end());
  }
  const std::vector<NamedTensor>& tensors() const { return tensors_; }

 private:
  std::vector<NamedTensor> tensors_;
};

std::string golden_weights(const std::string& name) {
  return (kGolden / name / "model.safetensors").string();
}

/// A tensor of a file.
Tensor tensor_in(const CheckpointReader& file, const std::string& name) {
  const SafetensorsEntry& entry = file.find(name);
  const Tensor tensor = Tensor::zeros(entry.shape, {entry.dtype, Device()});
  std::memcpy(tensor.raw(), file.data(name),
              static_cast<std::size_t>(entry.end - entry.begin));
  return tensor;
}

std::vector<NamedTensor> tensors_in(const std::string& path) {
  const CheckpointReader file = CheckpointReader::open(path);
  std::vector<NamedTensor> tensors;
  for (const std::string& name : file.names()) {
    tensors.push_back({name, tensor_in(file, name)});
  }
  return tensors;
}

class LlamaFiles : public CommonFiles {
 protected:
  /// Writes the tensors of a golden file after a change.
  template <typename Change>
  std::string changed(const std::string& name, const Change& change) const {
    std::vector<NamedTensor> tensors = tensors_in(golden_weights(name));
    change(tensors);
    save_tensors(path("changed.safetensors"), tensors);
    return path("changed.safetensors");
  }
};

double value_at(const Tensor& tensor, const std::vector<std::int64_t>& index) {
  std::int64_t at = 0;
  for (std::size_t d = 0; d < index.size(); ++d) {
    at = at * tensor.shape()[d] + index[d];
  }
  return tensor.to_vector<double>()[static_cast<std::size_t>(at)];
}

// --- Names -------------------------------------------------------------------

TEST_F(LlamaFiles, TheirNamesAreThoseOfTransformers) {
  for (const std::string& name : golden_models()) {
    SCOPED_TRACE(name);
    const ModelConfig config = golden_config(name);
    const CheckpointReader file = CheckpointReader::open(golden_weights(name));
    std::set<std::string> names;
    std::int64_t elements = 0;
    for (const TensorInFiles& weight : llama_weights(config)) {
      for (const FilePiece& piece : weight.pieces) {
        EXPECT_TRUE(names.insert(piece.name).second) << piece.name;
        EXPECT_EQ(file.find(piece.name).shape, weight.shape_in_file(piece))
            << piece.name;
      }
      std::int64_t product = 1;
      for (const std::int64_t size : weight.shape) product *= size;
      elements += product;
      EXPECT_EQ(llama_weight(config, weight.name).shape, weight.shape);
    }
    EXPECT_EQ(names.size(), file.names().size());
    EXPECT_EQ(num_parameters(config), elements);
  }
}

TEST_F(LlamaFiles, NamesInMemoryAreFused) {
  const auto shape = [](const std::string& model, const std::string& name) {
    return llama_weight(golden_config(model), name).shape;
  };
  const std::string layer = "model.layers.1.";
  EXPECT_EQ(shape("llama_gqa", layer + "self_attn.qkv_proj.weight"),
            (Shape{32, 64}));
  EXPECT_EQ(shape("llama_biases", layer + "self_attn.qkv_proj.bias"),
            (Shape{64}));
  EXPECT_EQ(shape("llama_biases", layer + "mlp.gate_up_proj.bias"),
            (Shape{112}));
  EXPECT_EQ(shape("llama_biases", layer + "self_attn.o_proj.bias"),
            (Shape{32}));
  // Heads are wider than the hidden size
  EXPECT_EQ(shape("qwen3_qk_norm", layer + "self_attn.o_proj.weight"),
            (Shape{48, 32}));
  EXPECT_EQ(shape("qwen3_qk_norm", layer + "self_attn.k_norm.weight"),
            (Shape{12}));
  EXPECT_EQ(shape("mixtral_top2", layer + "mlp.experts.gate_up_proj"),
            (Shape{4, 32, 112}));
  EXPECT_EQ(shape("mixtral_top2", layer + "mlp.experts.down_proj"),
            (Shape{4, 56, 32}));
  EXPECT_EQ(shape("mixtral_top2", layer + "mlp.gate.weight"), (Shape{32, 4}));
  EXPECT_EQ(shape("llama_gqa", "lm_head.weight"), (Shape{96, 32}));
  for (const auto& [model, name] :
       std::vector<std::pair<std::string, std::string>>{
           {"llama_tied_llama3_rope", "lm_head.weight"},
           {"llama_gqa", layer + "self_attn.qkv_proj.bias"},
           {"llama_gqa", "model.layers.2.input_layernorm.weight"},
           {"llama_gqa", layer + "mlp.gate.weight"},
           {"mixtral_top2", layer + "mlp.gate_up_proj.weight"}}) {
    expect_error([&] { shape(model, name); }, {"no weight '" + name});
  }
}

TEST(LlamaWeights, OfABlockAreExpertsOrDense) {
  const ModelConfig config = ModelConfig::read(
      R"({"model_type": "qwen3_moe", "hidden_size": 32, "num_hidden_layers": 2,
          "num_attention_heads": 4, "intermediate_size": 56,
          "moe_intermediate_size": 24, "num_experts": 4,
          "num_experts_per_tok": 2, "mlp_only_layers": [0]})");
  EXPECT_EQ(
      llama_weight(config, "model.layers.0.mlp.gate_up_proj.weight").shape,
      (Shape{32, 112}));
  const TensorInFiles experts =
      llama_weight(config, "model.layers.1.mlp.experts.gate_up_proj");
  EXPECT_EQ(experts.shape, (Shape{4, 32, 48}));
  EXPECT_EQ(experts.pieces.size(), 8u);
  EXPECT_EQ(experts.pieces[7].name,
            "model.layers.1.mlp.experts.3.up_proj.weight");
  EXPECT_EQ(
      llama_weight(config, "model.layers.1.mlp.gate.weight").pieces[0].name,
      "model.layers.1.mlp.gate.weight");
  std::int64_t elements = 0;
  for (const TensorInFiles& weight : llama_weights(config)) {
    std::int64_t product = 1;
    for (const std::int64_t size : weight.shape) product *= size;
    elements += product;
  }
  EXPECT_EQ(num_parameters(config), elements);
}

// --- Values ------------------------------------------------------------------

TEST_F(LlamaFiles, AreWrittenAsTheyWereBitForBit) {
  for (const std::string& name : golden_models()) {
    SCOPED_TRACE(name);
    const ModelConfig config = golden_config(name);
    Weights model(config);
    load_model((kGolden / name).string(), model, config);
    save_model(path("m.safetensors"), model, config);
    const CheckpointReader before =
        CheckpointReader::open(golden_weights(name));
    const CheckpointReader after =
        CheckpointReader::open(path("m.safetensors"));
    EXPECT_EQ(after.names().size(), before.names().size());
    for (const std::string& each : before.names()) {
      EXPECT_TRUE(
          bitwise_equal(tensor_in(before, each), tensor_in(after, each)))
          << each;
    }
    EXPECT_EQ(after.metadata().at("format"), "pt");
    EXPECT_EQ(config_in(path("m.safetensors")), config.to_json());
    check_config_of_file(path("m.safetensors"), config);
    check_config_of_file((kGolden / name).string(), config);
  }
}

// The oracle is the index: where a value of the file is in memory.
TEST_F(LlamaFiles, AreTransposedAndSideBySideInMemory) {
  const auto check = [](const std::string& model, const std::string& name,
                        const std::vector<std::int64_t>& index,
                        const std::string& in_file,
                        const std::vector<std::int64_t>& index_in_file) {
    const ModelConfig config = golden_config(model);
    Weights weights(config);
    load_model(golden_weights(model), weights, config);
    const CheckpointReader file = CheckpointReader::open(golden_weights(model));
    EXPECT_EQ(value_at(weights.at(name), index),
              value_at(tensor_in(file, in_file), index_in_file))
        << name;
  };
  const std::string layer = "model.layers.1.";
  const std::string attn = layer + "self_attn.", mlp = layer + "mlp.",
                    moe = layer + "block_sparse_moe.";
  // llama_gqa: 4 heads of queries, 2 of keys and values, of width 8
  check("llama_gqa", attn + "qkv_proj.weight", {3, 5}, attn + "q_proj.weight",
        {5, 3});
  check("llama_gqa", attn + "qkv_proj.weight", {3, 32 + 5},
        attn + "k_proj.weight", {5, 3});
  check("llama_gqa", attn + "qkv_proj.weight", {3, 48 + 5},
        attn + "v_proj.weight", {5, 3});
  check("llama_gqa", attn + "o_proj.weight", {3, 5}, attn + "o_proj.weight",
        {5, 3});
  check("llama_gqa", mlp + "gate_up_proj.weight", {3, 55},
        mlp + "gate_proj.weight", {55, 3});
  check("llama_gqa", mlp + "gate_up_proj.weight", {3, 56},
        mlp + "up_proj.weight", {0, 3});
  check("llama_gqa", mlp + "down_proj.weight", {50, 3},
        mlp + "down_proj.weight", {3, 50});
  check("llama_gqa", "lm_head.weight", {90, 3}, "lm_head.weight", {90, 3});
  check("llama_gqa", "model.embed_tokens.weight", {90, 3},
        "model.embed_tokens.weight", {90, 3});
  check("llama_biases", attn + "qkv_proj.bias", {48 + 2}, attn + "v_proj.bias",
        {2});
  check("llama_biases", mlp + "gate_up_proj.bias", {56 + 2},
        mlp + "up_proj.bias", {2});
  check("mixtral_top2", mlp + "gate.weight", {3, 2}, moe + "gate.weight",
        {2, 3});
  check("mixtral_top2", mlp + "experts.gate_up_proj", {2, 3, 7},
        moe + "experts.2.w1.weight", {7, 3});
  check("mixtral_top2", mlp + "experts.gate_up_proj", {2, 3, 56 + 7},
        moe + "experts.2.w3.weight", {7, 3});
  check("mixtral_top2", mlp + "experts.down_proj", {2, 7, 3},
        moe + "experts.2.w2.weight", {3, 7});
}

TEST_F(LlamaFiles, APartIsTheSliceOfTheWhole) {
  // Cuts of each kind: rows, columns, columns of each block, experts, two at once
  const std::vector<std::pair<std::string, Shards>> parts = {
      {"self_attn.qkv_proj.weight", {{1, 1, 2, 4}}},
      {"self_attn.qkv_proj.weight", {{0, 3, 4}, {1, 1, 2}}},
      {"self_attn.qkv_proj.bias", {{0, 1, 2, 4}}},
      {"self_attn.o_proj.weight", {{0, 1, 4}}},
      {"self_attn.o_proj.weight", {{1, 2, 4}}},
      {"mlp.gate_up_proj.weight", {{1, 1, 2, 2}}},
      {"mlp.gate_up_proj.weight", {{1, 3, 4, 2}, {0, 1, 2}}},
      {"mlp.gate_up_proj.bias", {{0, 1, 2, 2}}},
      {"mlp.down_proj.weight", {{0, 1, 2}}},
      {"mlp.down_proj.weight", {{0, 1, 3, 1, 56}}},  // uneven
      {"mlp.gate.weight", {{1, 1, 2}}},
      {"mlp.experts.gate_up_proj", {{0, 1, 2}}},
      {"mlp.experts.gate_up_proj", {{0, 1, 4}, {2, 1, 2, 2}}},
      {"mlp.experts.gate_up_proj", {{1, 1, 2}}},
      {"mlp.experts.down_proj", {{0, 3, 4}, {1, 1, 2}}},
      {"input_layernorm.weight", {{0, 1, 2}}}};
  int tried = 0;
  for (const std::string& name : golden_models()) {
    const ModelConfig config = golden_config(name);
    Weights whole(config);
    load_model(golden_weights(name), whole, config);
    for (const auto& [weight, shards] : parts) {
      const PartOf part_of = [&, &cut = shards,
                              &suffix = weight](const std::string& each) {
        const bool is_cut = each.size() > suffix.size() &&
                            each.compare(each.size() - suffix.size() - 1,
                                         each.npos, "." + suffix) == 0;
        const bool fits = cut[0].length == 0 ||
                          cut[0].length == config.llama.intermediate_size;
        return is_cut && fits ? PartOfFile{cut, 0} : PartOfFile{};
      };
      Weights part(config, DType::kF32, part_of);
      load_model(golden_weights(name), part, config, part_of);
      for (const NamedTensor& each : part.tensors()) {
        const Shards cut = part_of(each.name).shards;
        EXPECT_TRUE(
            bitwise_equal(each.tensor, take_part(whole.at(each.name), cut)))
            << name << " " << each.name;
        tried += cut.empty() ? 0 : 1;
      }
    }
  }
  EXPECT_GT(tried, 150);
}

// Rows of a table that the file has not are zeros.
TEST_F(LlamaFiles, TablesArePadded) {
  const std::string name = "llama_gqa";
  const ModelConfig config = golden_config(name);
  const PartOf part_of = [](const std::string& each) {
    const bool is_table =
        each == "lm_head.weight" || each == "model.embed_tokens.weight";
    return is_table ? PartOfFile{{{0, 2, 3}}, 102} : PartOfFile{};
  };
  Weights whole(config), part(config, DType::kF32, part_of);
  load_model(golden_weights(name), whole, config);
  load_model(golden_weights(name), part, config, part_of);
  const Tensor expected =
      Tensor::zeros({34, 32}, whole.at("lm_head.weight").options());
  std::memcpy(expected.raw(),
              static_cast<const std::byte*>(whole.at("lm_head.weight").raw()) +
                  68 * 32 * 4,
              28 * 32 * 4);
  EXPECT_TRUE(bitwise_equal(part.at("lm_head.weight"), expected));
}

TEST_F(LlamaFiles, AreConvertedToTheModelsDtype) {
  const ModelConfig config = golden_config("mixtral_top2");
  Weights single(config), wide(config, DType::kF64),
      narrow(config, DType::kBF16);
  load_model(golden_weights("mixtral_top2"), single, config);
  load_model(golden_weights("mixtral_top2"), wide, config);
  load_model(golden_weights("mixtral_top2"), narrow, config);
  for (const NamedTensor& each : single.tensors()) {
    EXPECT_EQ(each.tensor.to_vector<double>(),
              wide.at(each.name).to_vector<double>());
    const Tensor rounded =
        Tensor::empty(each.tensor.shape(), {DType::kBF16, Device()});
    rounded.copy_from(each.tensor);
    EXPECT_TRUE(bitwise_equal(narrow.at(each.name), rounded));
  }
  // 16 and 64 bits as well
  for (Weights* model : {&wide, &narrow}) {
    save_model(path("m.safetensors"), *model, config);
    Weights again(config, model->tensors()[0].tensor.dtype());
    load_model(path("m.safetensors"), again, config);
    for (const NamedTensor& each : model->tensors()) {
      EXPECT_TRUE(bitwise_equal(each.tensor, again.at(each.name)));
    }
  }
}

// One of the tensors that are joined has another dtype, and numbers that the
// others' does not have.
TEST_F(LlamaFiles, TensorsOfTwoDtypesAreJoined) {
  const ModelConfig config = golden_config("llama_gqa");
  const std::string k = "model.layers.0.self_attn.k_proj.weight";
  Tensor wide;
  const std::string file = changed("llama_gqa", [&](auto& tensors) {
    for (NamedTensor& each : tensors) {
      if (each.name != k) continue;
      wide = Tensor::empty(each.tensor.shape(), {DType::kF64, Device()});
      wide.copy_from(each.tensor);
      wide = each.tensor = scale(wide, 1.0 / 3);
    }
  });
  Weights model(config, DType::kF64);
  load_model(file, model, config);
  save_model(path("joined.safetensors"), model, config);
  const auto saved = SafetensorsFile::open(path("joined.safetensors"));
  ASSERT_EQ(saved.find(k).dtype, DType::kF64);
  EXPECT_EQ(std::memcmp(saved.data(saved.find(k)), wide.raw(),
                        static_cast<std::size_t>(wide.numel()) * 8),
            0);
}

// A stage of a pipeline has some of the weights.
TEST_F(LlamaFiles, AModelMayHaveSomeOfTheWeights) {
  const ModelConfig config = golden_config("llama_gqa");
  Weights whole(config), stage(config);
  for (const NamedTensor& each : whole.tensors()) {
    if (each.name.find("layers.1.") == each.name.npos) stage.remove(each.name);
  }
  load_model(golden_weights("llama_gqa"), whole, config);
  load_model(golden_weights("llama_gqa"), stage, config);
  EXPECT_FALSE(stage.tensors().empty());
  for (const NamedTensor& each : stage.tensors()) {
    EXPECT_TRUE(bitwise_equal(each.tensor, whole.at(each.name)));
  }
}

TEST_F(LlamaFiles, MayLackTheNameOfTheWholeOrHaveWrappers) {
  const ModelConfig config = golden_config("llama_tied_llama3_rope");
  Weights expected(config);
  load_model(golden_weights("llama_tied_llama3_rope"), expected, config);
  for (const bool is_bare : {true, false}) {
    const std::string file =
        changed("llama_tied_llama3_rope", [&](auto& tensors) {
          for (NamedTensor& each : tensors) {
            each.name = is_bare ? each.name.substr(6) : "module." + each.name;
          }
        });
    Weights model(config);
    load_model(file, model, config);
    for (const NamedTensor& each : expected.tensors()) {
      EXPECT_TRUE(bitwise_equal(each.tensor, model.at(each.name)));
    }
  }
}

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
