// Models: their configs, their gradients, and their files.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "chapters/common/models/checkpoint.h"
#include "chapters/common/models/models.h"
#include "core/autograd.h"
#include "core/context.h"
#include "tests/chapters/common/common_support.h"

namespace shardbook::common_test {
namespace {

namespace files = std::filesystem;

// --- Configs ----------------------------------------------------------------

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
  refuse("{\"model_type\": \"llama\"}", {"llama", "gpt2"});
  refuse("{\"model_type\": 3}", {"\"model_type\" is 3"});
  refuse("{\"activation_function\": \"relu\"}", {"relu", "gelu_new"});
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

// --- Models -----------------------------------------------------------------

Tensor tiny_tokens() {
  return Tensor::from_values<std::int64_t>({1, 5, 10, 0, 3, 3, 7, 2}, {2, 4});
}
Tensor tiny_targets() {
  return Tensor::from_values<std::int64_t>({5, 10, 0, 2, 3, 7, 2, 9}, {2, 4});
}

/// Weights large enough that every gradient can be seen.
void spread(Module& model) {
  std::uint64_t stream = 0;
  for (const Tensor& p : model.parameters()) {
    fill_normal(p, 17, ++stream, 0.1, 0.4);
  }
}

TEST(Gpt, GradientsEqualDifferences) {
  for (bool recompute : {false, true}) {
    Gpt model(tiny(), f64_init());
    spread(model);
    set_recompute(model, recompute);
    EXPECT_LT(autograd::check_gradients(
                  [&](const Tensors&) {
                    return language_loss(model(tiny_tokens()), tiny_targets());
                  },
                  model.parameters()),
              1e-7);
  }
}

TEST(Gpt, GradientsWithDropoutEqualDifferences) {
  ModelConfig config = tiny();
  config.dropout = 0.2;
  Gpt model(config, f64_init());
  spread(model);
  EXPECT_LT(autograd::check_gradients(
                [&](const Tensors&) {
                  ContextValue<RandomState> same(&RankContext::random,
                                                 RandomState{3, 1, 0, {}});
                  return language_loss(model(tiny_tokens()), tiny_targets());
                },
                model.parameters()),
            1e-7);
}

TEST(MlpModel, GradientsEqualDifferences) {
  ModelConfig config = tiny();
  config.type = "mlp";
  MlpModel model(config, f64_init());
  EXPECT_LT(autograd::check_gradients(
                [&](const Tensors&) {
                  return language_loss(model(tiny_tokens()), tiny_targets());
                },
                model.parameters()),
            1e-6);
}

TEST(Gpt, HasThePublishedNames) {
  Gpt model(tiny(), f64_init());
  std::vector<std::string> names;
  for (const NamedTensor& p : model.named_parameters()) names.push_back(p.name);
  EXPECT_EQ(names.size(), 2u + 2 * 12 + 2);
  EXPECT_EQ(names.front(), "transformer.wte.weight");
  EXPECT_EQ(names[2], "transformer.h.0.ln_1.weight");
  EXPECT_EQ(names[4], "transformer.h.0.attn.c_attn.weight");
  EXPECT_EQ(names.back(), "transformer.ln_f.bias");
  EXPECT_EQ(model.named_parameters()[4].tensor.shape(), (Shape{8, 24}));
}

TEST(Gpt, DoesNotSeeTheFuture) {
  Gpt model(tiny(), f64_init());
  spread(model);
  const Tensor a = tiny_tokens(), b = a.clone();
  b.data<std::int64_t>()[3] = 9;  // the last token of the first row
  const Tensor ya = model(a), yb = model(b);
  EXPECT_TRUE(bitwise_equal(slice(slice(ya, 0, 0, 1), 1, 0, 3).detach(),
                            slice(slice(yb, 0, 0, 1), 1, 0, 3).detach()));
  EXPECT_GT(max_abs_difference(ya, yb), 1e-3);
}

TEST(Gpt, RefusesMoreTokensThanPositions) {
  Gpt model(tiny(), f64_init());
  expect_error(
      [&] {
        model(Tensor::zeros({1, 7}, {DType::kI64, Device()}));
      },
      {"7 tokens", "6 positions"});
}

TEST(Gpt, BeginsNearTheEntropyOfItsVocabulary) {
  Gpt model(tiny(), f64_init());
  const double loss =
      language_loss(model(tiny_tokens()), tiny_targets()).item();
  EXPECT_NEAR(loss, std::log(11.0), 0.05);
}

// --- Checkpoints ------------------------------------------------------------

class ModelFiles : public CommonFiles {};

TEST_F(ModelFiles, BringBackEveryBit) {
  Gpt saved(tiny(), f64_init(1)), loaded(tiny(), f64_init(2));
  save_model(path("m.safetensors"), saved, tiny());
  load_model(path("m.safetensors"), loaded);
  const auto a = saved.named_parameters(), b = loaded.named_parameters();
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_TRUE(bitwise_equal(a[i].tensor, b[i].tensor)) << a[i].name;
  }
  EXPECT_EQ(config_of_file(path("m.safetensors")).to_json(), tiny().to_json());
}

TEST_F(ModelFiles, AreConvertedToTheModelsDtype) {
  InitOptions bf16;
  bf16.dtype = DType::kBF16;
  Gpt saved(tiny(), f64_init(1)), loaded(tiny(), bf16);
  save_model(path("m.safetensors"), saved, tiny());
  load_model(path("m.safetensors"), loaded);
  EXPECT_EQ(loaded.wte.as<Embedding>().weight.dtype(), DType::kBF16);
  EXPECT_LT(max_abs_difference(loaded.wte.as<Embedding>().weight,
                               saved.wte.as<Embedding>().weight),
            1e-3);
}

TEST_F(ModelFiles, MayLackTheNameOfTheWhole) {
  Gpt saved(tiny(), f64_init(1)), loaded(tiny(), f64_init(2));
  std::vector<NamedTensor> bare = saved.named_parameters();
  for (NamedTensor& entry : bare) {
    entry.name = entry.name.substr(std::string("transformer.").size());
  }
  save_tensors(path("bare.safetensors"), bare);
  load_model(path("bare.safetensors"), loaded);
  EXPECT_TRUE(bitwise_equal(loaded.wpe.as<Embedding>().weight,
                            saved.wpe.as<Embedding>().weight));
}

TEST_F(ModelFiles, ThatDoNotFitAreRefusedAndChangeNothing) {
  ModelConfig wide = tiny();
  wide.n_positions = 7;
  Gpt saved(wide, f64_init(1)), model(tiny(), f64_init(2));
  const Tensor before = model.wte.as<Embedding>().weight.clone();
  save_model(path("wide.safetensors"), saved, wide);
  expect_error(
      [&] { load_model(path("wide.safetensors"), model); },
      {"wide.safetensors", "'transformer.wpe.weight'", "[7, 8]", "[6, 8]"});
  EXPECT_TRUE(bitwise_equal(model.wte.as<Embedding>().weight, before));

  std::vector<NamedTensor> some = model.named_parameters();
  some.pop_back();
  save_tensors(path("some.safetensors"), some);
  expect_error([&] { load_model(path("some.safetensors"), model); },
               {"some.safetensors", "'transformer.ln_f.bias'"});
  some = model.named_parameters();
  some[0].tensor = Tensor::zeros({11, 8}, {DType::kI64, Device()});
  save_tensors(path("ints.safetensors"), some);
  expect_error([&] { load_model(path("ints.safetensors"), model); },
               {"'transformer.wte.weight'", "I64", "BF16"});
  EXPECT_TRUE(bitwise_equal(model.wte.as<Embedding>().weight, before));
  expect_error([&] { load_model(path("none.safetensors"), model); },
               {"none.safetensors"});
  expect_error([&] { config_of_file(path("some.safetensors")); },
               {"config", "--model"});
}

}  // namespace
}  // namespace shardbook::common_test
