// Weights of the Llama family: files of transformers, joined in memory, and
// written apart again.

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
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
#include "tests/chapters/common/llama_weights.h"
#include "tests/support/errors.h"

namespace shardbook::common_test {
namespace {

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

}  // namespace
}  // namespace shardbook::common_test
