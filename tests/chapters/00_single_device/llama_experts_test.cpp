// The experts of Mixtral and Qwen3-MoE against loops that compute one token after
// another, in f64; and the losses and refusals around them.

#include "chapters/common/models/llama_experts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "chapters/common/models/internal/llama_files.h"
#include "chapters/programs/programs.h"
#include "core/autograd.h"
#include "core/ops.h"
#include "tests/chapters/common/claims_support.h"
#include "tests/support/errors.h"
#include "tests/support/temp_folder.h"

namespace shardbook {
namespace {

using nlohmann::json;

using Values = std::vector<double>;

/// Three blocks, the middle one dense; 5 experts of width 3.
json tiny_qwen() {
  return {{"model_type", "qwen3_moe"},
          {"vocab_size", 19},
          {"hidden_size", 4},
          {"num_hidden_layers", 3},
          {"num_attention_heads", 2},
          {"num_key_value_heads", 1},
          {"head_dim", 2},
          {"intermediate_size", 6},
          {"moe_intermediate_size", 3},
          {"num_experts", 5},
          {"num_experts_per_tok", 2},
          {"norm_topk_prob", false},
          {"mlp_only_layers", {1}},
          {"max_position_embeddings", 32},
          {"initializer_range", 0.5}};
}

ModelConfig config_of(const json& keys) {
  return ModelConfig::from_json(keys.dump(), "test");
}

InitOptions in_f64() {
  InitOptions init;
  init.seed = 5;
  init.dtype = DType::kF64;
  return init;
}

// --- The loops -------------------------------------------------------------------

/// down(silu(gate x) * (up x)) of one token; gate_up [h, 2f], down [f, h].
Values mlp_of(const Values& x, const double* gate_up, const double* down,
              std::size_t f) {
  const std::size_t h = x.size();
  Values y(h, 0);
  for (std::size_t j = 0; j < f; ++j) {
    double gate = 0, up = 0;
    for (std::size_t i = 0; i < h; ++i) {
      gate += x[i] * gate_up[i * 2 * f + j];
      up += x[i] * gate_up[i * 2 * f + f + j];
    }
    const double product = gate / (1 + std::exp(-gate)) * up;
    for (std::size_t i = 0; i < h; ++i) y[i] += product * down[j * h + i];
  }
  return y;
}

struct LoopExperts {
  std::size_t h = 0, f = 0, experts = 0, k = 0;
  bool divides = false;
  Values x, gate, gate_up, down;

  Values softmax_of(std::size_t token) const {
    Values p(experts, 0);
    double total = 0;
    for (std::size_t e = 0; e < experts; ++e) {
      double logit = 0;
      for (std::size_t i = 0; i < h; ++i) {
        logit += x[token * h + i] * gate[i * experts + e];
      }
      total += p[e] = std::exp(logit);
    }
    for (double& each : p) each /= total;
    return p;
  }
  std::vector<std::size_t> chosen_by(std::size_t token) const {
    const Values p = softmax_of(token);
    std::vector<std::size_t> order(experts);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](auto a, auto b) { return p[a] > p[b]; });
    order.resize(k);
    return order;
  }
  Values output() const {
    Values all;
    for (std::size_t token = 0; token < x.size() / h; ++token) {
      const Values row(
          x.begin() + static_cast<std::ptrdiff_t>(token * h),
          x.begin() + static_cast<std::ptrdiff_t>((token + 1) * h));
      const Values p = softmax_of(token);
      Values y(h, 0);
      double sum = 0;
      for (const std::size_t e : chosen_by(token)) sum += p[e];
      for (const std::size_t e : chosen_by(token)) {
        const Values of_expert = mlp_of(row, gate_up.data() + e * h * 2 * f,
                                        down.data() + e * f * h, f);
        for (std::size_t i = 0; i < h; ++i) {
          y[i] += p[e] / (divides ? sum : 1) * of_expert[i];
        }
      }
      all.insert(all.end(), y.begin(), y.end());
    }
    return all;
  }
};

LoopExperts loop_of(const LlamaExperts& layer, const ModelConfig& config,
                    const Tensor& x) {
  LoopExperts loop;
  loop.h = static_cast<std::size_t>(config.n_embd);
  loop.f = static_cast<std::size_t>(config.llama.moe_intermediate_size);
  loop.experts = static_cast<std::size_t>(config.llama.num_experts);
  loop.k = static_cast<std::size_t>(config.llama.experts_per_token);
  loop.divides = config.llama.norm_topk_prob;
  loop.x = x.to_vector<double>();
  loop.gate = layer.gate_weight.to_vector<double>();
  loop.gate_up = layer.gate_up_proj.to_vector<double>();
  loop.down = layer.down_proj.to_vector<double>();
  return loop;
}

void expect_near(const Values& ours, const Values& theirs, double tolerance) {
  ASSERT_EQ(ours.size(), theirs.size());
  for (std::size_t i = 0; i < ours.size(); ++i) {
    EXPECT_NEAR(ours[i], theirs[i], tolerance) << i;
  }
}

/// [2, 7, 4], without order.
Tensor some_tokens() {
  Values values;
  for (int i = 0; i < 56; ++i) values.push_back(1.5 * std::sin(1.7 * i * i));
  return Tensor::from_values(values, {2, 7, 4});
}

// --- One layer -------------------------------------------------------------------

class LlamaExpertsLayer : public testing::TestWithParam<json> {};

TEST_P(LlamaExpertsLayer, EqualsLoopsOverTokens) {
  json keys = tiny_qwen();
  keys.update(GetParam());
  const ModelConfig config = config_of(keys);
  LlamaExperts layer("model.layers.0.mlp", config, in_f64());
  Tensor x = some_tokens();
  x.set_requires_grad(true);
  LoopExperts loop = loop_of(layer, config, x);
  const Tensor y = layer(x);
  expect_near(y.to_vector<double>(), loop.output(), 1e-12);

  // Gradients of sum(c y), c without order, beside differences of the loops
  Values factors;
  for (int i = 0; i < 56; ++i) factors.push_back(std::cos(2.3 * i * i));
  const auto value = [&] {
    const Values at = loop.output();
    return std::inner_product(at.begin(), at.end(), factors.begin(), 0.0);
  };
  sum(mul(y, Tensor::from_values(factors, {2, 7, 4}))).backward();
  const std::vector<std::pair<Tensor, Values*>> all = {
      {x, &loop.x},
      {layer.gate_weight, &loop.gate},
      {layer.gate_up_proj, &loop.gate_up},
      {layer.down_proj, &loop.down}};
  for (const auto& [tensor, values] : all) {
    const Values gradient = tensor.grad().to_vector<double>();
    ASSERT_EQ(gradient.size(), values->size());
    for (std::size_t i = 0; i < values->size(); ++i) {
      const double before = (*values)[i], step = 1e-6;
      (*values)[i] = before + step;
      const double above = value();
      (*values)[i] = before - step;
      const double below = value();
      (*values)[i] = before;
      EXPECT_NEAR(gradient[i], (above - below) / (2 * step), 2e-8) << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Sizes, LlamaExpertsLayer,
    testing::Values(json::object(), json{{"norm_topk_prob", true}},
                    json{{"num_experts_per_tok", 1}},
                    json{{"num_experts_per_tok", 1}, {"norm_topk_prob", true}},
                    json{{"num_experts_per_tok", 5}},
                    json{{"num_experts_per_tok", 3}, {"norm_topk_prob", true}},
                    json{{"num_experts", 1}, {"num_experts_per_tok", 1}}));

TEST(LlamaExperts, AllTokensMayChooseTheSameExpert) {
  const ModelConfig config = config_of(tiny_qwen());
  LlamaExperts layer("model.layers.0.mlp", config, in_f64());
  const Tensor x = Tensor::full({1, 9, 4}, 0.5, {DType::kF64, Device()});
  LoopExperts loop = loop_of(layer, config, x);
  expect_near(layer(x).to_vector<double>(), loop.output(), 1e-12);
}

TEST(LlamaExperts, OfEqualProbabilitiesTheLowerIndexIsChosen) {
  const ModelConfig config = config_of(tiny_qwen());
  LlamaExperts layer("model.layers.0.mlp", config, in_f64());
  layer.gate_weight.detach().fill(0);
  const Tensor x = some_tokens();
  LoopExperts loop = loop_of(layer, config, x);
  EXPECT_EQ(loop.chosen_by(0), (std::vector<std::size_t>{0, 1}));
  expect_near(layer(x).to_vector<double>(), loop.output(), 1e-12);
}

// In bf16 both probabilities would be 0.5, and the first expert be chosen.
TEST(LlamaExperts, SoftmaxIsComputedInF32) {
  json keys = tiny_qwen();
  keys.update({{"num_experts", 2}, {"num_experts_per_tok", 1}});
  InitOptions init = in_f64();
  init.dtype = DType::kBF16;
  LlamaExperts layer("model.layers.0.mlp", config_of(keys), init);
  std::vector<float> gate(8, 0);
  gate[1] = 1e-4F;
  layer.gate_weight.detach().copy_from(
      to_dtype(Tensor::from_values(gate, {4, 2}), DType::kBF16));
  layer.down_proj.detach().rows_view(0, 1).fill(0);
  const Tensor x = Tensor::full({1, 1, 4}, 1, {DType::kBF16, Device()});
  const Values y = to_dtype(layer(x), DType::kF64).to_vector<double>();
  EXPECT_NE(y, Values(4, 0)) << "the expert whose product is zero";
}

// --- A model ---------------------------------------------------------------------

TEST(LlamaExperts, ConfigSaysWhichBlocksHaveThem) {
  const ModelConfig config = config_of(tiny_qwen());
  Gpt model(config, in_f64());
  std::vector<std::string> types, ours, of_files;
  for (const GptBlock& block : model.h)
    types.push_back((*block.mlp).type_name());
  EXPECT_EQ(types, (std::vector<std::string>{"LlamaExperts", "GptMlp",
                                             "LlamaExperts"}));
  double counted = 0;
  for (std::int64_t i = 0; i < 3; ++i) {
    for (const BlockPart& part : block_table(config, i).parts()) {
      counted += part.parameters();
    }
  }
  EXPECT_EQ(counted + 2 * 19 * 4 + 4, num_parameters(config));
  EXPECT_EQ(model.num_parameters(), num_parameters(config));
  for (const NamedTensor& each : model.named_parameters()) {
    ours.push_back(each.name);
  }
  for (const TensorInFiles& each : llama_weights(config)) {
    of_files.push_back(each.name);
  }
  std::sort(ours.begin(), ours.end());
  std::sort(of_files.begin(), of_files.end());
  EXPECT_EQ(ours, of_files);
  const std::string refusal =
      error_of([&] { block_of(config, "model.layers.3.mlp"); });
  expect_text(refusal, {"model.layers.3.mlp", "3 blocks"});
}

TEST(LlamaExperts, EveryBlockEqualsLoopsOverTokens) {
  const ModelConfig config = config_of(tiny_qwen());
  Gpt model(config, in_f64());
  std::vector<Values> expected, found;
  for (GptBlock& block : model.h) {
    (*block.mlp).add_forward_pre_hook([&](Module& module, Tensors& in) {
      if (const auto* experts = dynamic_cast<LlamaExperts*>(&module)) {
        expected.push_back(loop_of(*experts, config, in[0]).output());
        return;
      }
      const auto& mlp = dynamic_cast<GptMlp&>(module);
      const Values x = in[0].to_vector<double>();
      const Values up = mlp.c_fc.as<Linear>().weight.to_vector<double>();
      const Values down = mlp.c_proj.as<Linear>().weight.to_vector<double>();
      expected.emplace_back();
      for (auto row = x.begin(); row != x.end(); row += 4) {
        const Values y = mlp_of({row, row + 4}, up.data(), down.data(), 6);
        expected.back().insert(expected.back().end(), y.begin(), y.end());
      }
    });
    (*block.mlp).add_forward_hook([&](Module&, Tensors& out) {
      found.push_back(out[0].to_vector<double>());
    });
  }
  model(Tensor::from_values<std::int64_t>({1, 5, 10, 0, 3, 3, 17, 2}, {2, 4}));
  ASSERT_EQ(found.size(), 3u);
  for (std::size_t i = 0; i < 3; ++i) {
    SCOPED_TRACE(i);
    expect_near(found[i], expected[i], 1e-12);
  }
}

/// Gradients of one step, all of them in a row, and the loss at the end.
Values gradients_of(const json& keys, bool recompute, DType dtype) {
  InitOptions init = in_f64();
  init.dtype = dtype;
  Gpt model(config_of(keys), init);
  set_recompute(model, recompute);
  const Tensor tokens =
      Tensor::from_values<std::int64_t>({1, 5, 10, 0, 3, 3, 17, 2}, {2, 4});
  const Tensor loss =
      with_balancing_loss(model, language_loss(model(tokens), tokens));
  loss.backward();
  Values all;
  for (const Tensor& parameter : model.parameters()) {
    const Values one =
        to_dtype(parameter.grad(), DType::kF64).to_vector<double>();
    all.insert(all.end(), one.begin(), one.end());
  }
  all.push_back(loss.item());
  return all;
}

TEST(LlamaExperts, RecomputationChangesNoBit) {
  json balanced = tiny_qwen();
  balanced.update(
      {{"output_router_logits", true}, {"router_aux_loss_coef", 0.3}});
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16}) {
    const Values plain = gradients_of(tiny_qwen(), false, dtype);
    EXPECT_EQ(plain, gradients_of(tiny_qwen(), true, dtype));
    const Values with_loss = gradients_of(balanced, false, dtype);
    EXPECT_EQ(with_loss, gradients_of(balanced, true, dtype));
    EXPECT_NE(plain, with_loss);
  }
}

// --- Training --------------------------------------------------------------------

std::string golden_line(const std::string& more,
                        const std::string& chapter = "00_single_device") {
  const std::string folder =
      std::string(SHARDBOOK_ROOT) + "/tests/golden/mixtral_aux_loss/";
  return chapter + " --model " + folder + "config.json --load " + folder +
         "model.safetensors --data " + folder +
         "tokens.u16 --batch 4 --seq 24 --dtype f64 " + more;
}

TEST(LlamaBalancing, LossIsReportedApart) {
  for (const std::string more : {"", " --recompute"}) {
    const Report report = run(golden_line(
        "--steps 4 --optimizer adamw --lr 0.003 --weight-decay 0.1" + more));
    expect_claims(report);
    ASSERT_EQ(report.more.size(), 1u);
    EXPECT_EQ(report.more[0].first, "balancing_losses");
    const json found = json::parse(report.more[0].second);
    const json expected = json::parse(std::ifstream(
        std::string(SHARDBOOK_ROOT) +
        "/tests/golden/mixtral_aux_loss/expected.json"))["aux_losses"];
    ASSERT_EQ(found.size(), 4u);
    // transformers averages in f32
    for (std::size_t i = 0; i < 4; ++i) {
      EXPECT_NEAR(found[i], expected[i], 2e-7) << i;
    }
    expect_text(report.remarks, {"balancing loss 2.0163", "0.05 times"});
  }
}

TEST(LlamaBalancing, InPartsIsRefused) {
  const auto refusal_of = [](const std::string& line) {
    return error_of([&] { run(line); });
  };
  for (const std::string& line :
       {golden_line("--steps 1 --micro-batches 2"),
        golden_line("--steps 1 --world-size 2 --micro-batches 2", "02_ddp")}) {
    expect_text(refusal_of(line), {"of all tokens of a batch together",
                                   "set output_router_logits to false"});
  }
  // Before anything runs
  for (const char* chapter : {"01_data_parallel", "04_model_parallel",
                              "05_gpipe", "06_1f1b", "12_sequence_parallel"}) {
    expect_text(refusal_of(golden_line("--steps 1 --world-size 2", chapter)),
                {"--model ", "of all tokens of a batch together"});
  }
}

TEST(LlamaBalancing, LossThatWasNotAddedIsRefused) {
  json keys = tiny_qwen();
  keys["output_router_logits"] = true;
  Gpt model(config_of(keys), in_f64());
  const Tensor tokens = Tensor::from_values<std::int64_t>({1, 5, 10}, {1, 3});
  const auto loss = [&] { return language_loss(model(tokens), tokens); };
  with_balancing_loss(model, loss()).backward();
  expect_text(error_of([&] { loss().backward(); }), {"balancing loss"});
  expect_text(error_of([&] { with_balancing_loss(model, loss(), 2); }),
              {"balancing loss"});
}

TEST(LlamaExperts, ClaimsHoldWithDenseBlocksAmongThem) {
  for (const std::string chapter :
       {"00_single_device", "00_single_device --recompute --micro-batches 2",
        "02_ddp --world-size 2"}) {
    SCOPED_TRACE(chapter);
    const Report report =
        run(chapter + " --model '" + tiny_qwen().dump() +
            "' --data random --batch 4 --seq 6 --steps 2 --dtype f64 --cluster "
            "textbook");
    expect_claims(report);
    const auto& held = report.ranks[0].held;
    EXPECT_EQ(held[static_cast<std::size_t>(MemoryKind::kActivation)].predicted,
              kNoClaim);
    EXPECT_EQ(report.time.closed_form_s, kNotPredicted);
    EXPECT_EQ(report.time.simulated_step_s, kNotPredicted);
  }
}

// On shapes every expert has ceil(S k / E) rows.
TEST(LlamaExperts, MixtralRunsOnShapes) {
  for (const std::string chapter :
       {"00_single_device", "02_ddp --world-size 2"}) {
    SCOPED_TRACE(chapter);
    const Report report =
        run(chapter +
            " --backend sim --model mixtral-8x7b --dtype bf16 --batch 2 "
            "--steps 1");
    EXPECT_EQ(report.ranks[0]
                  .held[static_cast<std::size_t>(MemoryKind::kParameter)]
                  .counted,
              2 * 46702792704.0);
    EXPECT_GT(report.time.step_s, 0);
  }
  const Device shapes = Device::meta(0);
  LlamaExperts layer("model.layers.0.mlp", config_of(tiny_qwen()),
                     {.device = shapes});
  const Tensor x = Tensor::empty({2, 7, 4}, {DType::kF32, shapes});
  EXPECT_EQ(layer(x).shape(), x.shape());
}

}  // namespace
}  // namespace shardbook
