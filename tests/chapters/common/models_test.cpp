// Models: their configs, their gradients, and their files.

#include <gtest/gtest.h>

#include <array>
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

TEST(Models, GradientsEqualDifferences) {
  struct Case {
    std::string type = "gpt2";
    double dropout = 0;
    GeluForm gelu = GeluForm::kTanh;
    bool recompute = false;
  };
  for (const Case& each :
       {Case{}, Case{.recompute = true}, Case{.dropout = 0.2},
        Case{.gelu = GeluForm::kErf}, Case{.type = "mlp"}}) {
    ModelConfig config = tiny();
    config.type = each.type;
    config.dropout = each.dropout;
    config.gelu = each.gelu;
    const auto model = make_model(config, f64_init());
    if (each.type == "gpt2") spread(*model);
    set_recompute(*model, each.recompute);
    const auto loss = [&](const Tensors&) {
      const ContextValue<RandomState> same(&RankContext::random,
                                           RandomState{3, 1, 0, {}});
      return language_loss((*model)(tiny_tokens()), tiny_targets());
    };
    EXPECT_LT(autograd::check_gradients(loss, model->parameters()),
              each.type == "gpt2" ? 1e-7 : 1e-6);
  }
}

TEST(GptMlp, ComputesTheGeluOfItsConfig) {
  for (const std::string name : {"gelu", "gelu_new"}) {
    const ModelConfig config = ModelConfig::from_json(
        with_sizes("\"activation_function\": \"" + name + "\""), "x");
    GptMlp mlp("mlp", config, f64_init());
    spread(mlp);
    const Tensor x = Tensor::empty({1, 3, 8}, {DType::kF64, Device()});
    fill_normal(x, 5, 1, 0, 1);
    const Tensor hidden = mlp.c_fc(x);
    auto values = hidden.to_vector<double>();
    for (double& v : values) {
      const double u =
          std::sqrt(2 / std::acos(-1.0)) * (v + 0.044715 * v * v * v);
      v = 0.5 * v *
          (1 + (name == "gelu" ? std::erf(v / std::sqrt(2.0)) : std::tanh(u)));
    }
    const Tensor expected =
        mlp.c_proj(Tensor::from_values<double>(values, hidden.shape()));
    EXPECT_LT(max_abs_difference(mlp(x), expected), 1e-13) << name;
  }
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

class ModelFiles : public CommonFiles {
 protected:
  /// The file preserves every bit of the model.
  void expect_in_file(const std::string& name, Gpt& model) const {
    Gpt loaded(tiny(), f64_init(2));
    load_model(path(name), loaded);
    const auto a = model.named_parameters(), b = loaded.named_parameters();
    for (std::size_t i = 0; i < a.size(); ++i) {
      EXPECT_TRUE(bitwise_equal(a[i].tensor, b[i].tensor)) << a[i].name;
    }
  }
};

TEST_F(ModelFiles, BringBackEveryBitAndTheConfig) {
  Gpt saved(tiny(), f64_init(1));
  save_model(path("m.safetensors"), saved, tiny());
  expect_in_file("m.safetensors", saved);
  EXPECT_EQ(config_in(path("m.safetensors")), tiny().to_json());
}

TEST_F(ModelFiles, AreConvertedToTheModelsDtype) {
  InitOptions bf16;
  bf16.dtype = DType::kBF16;
  Gpt saved(tiny(), f64_init(1)), loaded(tiny(), bf16);
  save_model(path("m.safetensors"), saved, tiny());
  load_model(path("m.safetensors"), loaded);
  EXPECT_EQ(loaded.embedding.wte.as<Embedding>().weight.dtype(), DType::kBF16);
  EXPECT_LT(max_abs_difference(loaded.embedding.wte.as<Embedding>().weight,
                               saved.embedding.wte.as<Embedding>().weight),
            1e-3);
}

TEST_F(ModelFiles, MayLackTheNameOfTheWhole) {
  Gpt saved(tiny(), f64_init(1));
  std::vector<NamedTensor> bare = saved.named_parameters();
  for (NamedTensor& entry : bare) {
    entry.name = entry.name.substr(std::string("transformer.").size());
  }
  save_tensors(path("bare.safetensors"), bare);
  expect_in_file("bare.safetensors", saved);
}

// Files of DistributedDataParallel, torch.compile, FSDP, and nested ones.
TEST_F(ModelFiles, MayHaveTheNamesOfPyTorchsWrappers) {
  Gpt saved(tiny(), f64_init(1));
  for (const std::string prefix :
       {"module.", "_orig_mod.", "_orig_mod.module.", "module._orig_mod.",
        "_fsdp_wrapped_module."}) {
    std::vector<NamedTensor> wrapped = saved.named_parameters();
    for (NamedTensor& entry : wrapped) entry.name = prefix + entry.name;
    // One block was compiled alone
    const std::string block = "transformer.h.1.";
    for (NamedTensor& entry : wrapped) {
      const std::size_t at = entry.name.find(block);
      if (at == std::string::npos) continue;
      entry.name.insert(at + block.size(), "_orig_mod.");
    }
    save_tensors(path("wrapped.safetensors"), wrapped);
    SCOPED_TRACE(prefix);
    expect_in_file("wrapped.safetensors", saved);
  }
}

// Averaged weights may be stored beside them. Catches a map of names that keeps
// the first or the last of the two.
TEST_F(ModelFiles, ANameWithoutWrappersCounts) {
  Gpt saved(tiny(), f64_init(1)), average(tiny(), f64_init(3));
  for (const bool is_first : {true, false}) {
    auto state = saved.named_parameters(), more = average.named_parameters();
    for (NamedTensor& entry : more) entry.name = "module." + entry.name;
    state.insert(is_first ? state.end() : state.begin(), more.begin(),
                 more.end());
    save_tensors(path("both.safetensors"), state);
    expect_in_file("both.safetensors", saved);
  }
}

// An output layer of its own would be dropped silently.
TEST_F(ModelFiles, AnOutputLayerThatIsNotTiedIsRefused) {
  Gpt saved(tiny(), f64_init(1)), loaded(tiny(), f64_init(2));
  std::vector<NamedTensor> state = saved.named_parameters();
  state.push_back({"lm_head.weight", state[0].tensor.clone()});
  save_tensors(path("tied.safetensors"), state);
  load_model(path("tied.safetensors"), loaded);
  state.back().tensor.data<double>()[3] += 1;
  save_tensors(path("untied.safetensors"), state);
  expect_error(
      [&] { load_model(path("untied.safetensors"), loaded); },
      {"untied.safetensors", "'lm_head.weight'", "'transformer.wte.weight'"});
}

TEST_F(ModelFiles, AConfigBesideThemMustComputeTheSame) {
  Gpt saved(tiny(), f64_init(1));
  const std::string file = path("model.safetensors");
  save_tensors(file, saved.named_parameters());
  const std::string folder = file.substr(0, file.rfind('/'));
  check_config_of_file(folder, tiny());  // none
  write("config.json", tiny().to_json());
  check_config_of_file(folder, tiny());
  ModelConfig other = tiny();
  other.n_head = 4;
  expect_error([&] { check_config_of_file(folder, other); },
               {folder, "\"n_head\" is 2", "4"});
  write("config.json", with_sizes(R"("scale_attn_weights": false)"));
  expect_error([&] { check_config_of_file(folder, tiny()); },
               {"config.json", "\"scale_attn_weights\""});
}

TEST_F(ModelFiles, ThatDoNotFitAreRefusedAndChangeNothing) {
  ModelConfig wide = tiny();
  wide.n_positions = 7;
  Gpt saved(wide, f64_init(1)), model(tiny(), f64_init(2));
  const Tensor before = model.embedding.wte.as<Embedding>().weight.clone();
  save_model(path("wide.safetensors"), saved, wide);
  expect_error(
      [&] { load_model(path("wide.safetensors"), model); },
      {"wide.safetensors", "'transformer.wpe.weight'", "[7, 8]", "[6, 8]"});
  EXPECT_TRUE(
      bitwise_equal(model.embedding.wte.as<Embedding>().weight, before));

  std::vector<NamedTensor> some = model.named_parameters();
  some.pop_back();
  save_tensors(path("some.safetensors"), some);
  expect_error([&] { load_model(path("some.safetensors"), model); },
               {"some.safetensors", "'transformer.ln_f.bias'",
                "of 27 names the first are 'transformer.h.0.attn."});
  some = model.named_parameters();
  some[0].tensor = Tensor::zeros({11, 8}, {DType::kI64, Device()});
  save_tensors(path("ints.safetensors"), some);
  expect_error([&] { load_model(path("ints.safetensors"), model); },
               {"'transformer.wte.weight'", "I64", "BF16"});
  EXPECT_TRUE(
      bitwise_equal(model.embedding.wte.as<Embedding>().weight, before));
  expect_error([&] { load_model(path("none.safetensors"), model); },
               {"none.safetensors"});
}

}  // namespace
}  // namespace shardbook::common_test
