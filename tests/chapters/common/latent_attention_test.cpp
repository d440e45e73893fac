// Latent attention against a replay head by head, in f64.

#include "chapters/common/models/latent_attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "core/ops.h"
#include "core/rope.h"
#include "tests/chapters/common/latent_support.h"
#include "tests/core/support.h"

namespace shardbook {
namespace {

constexpr std::int64_t kBatch = 2, kTokens = 7;

/// Columns of each row of x [n, s, w].
Tensor columns(const Tensor& x, std::int64_t first, std::int64_t n) {
  return slice(x, 2, first, first + n);
}

/// Turns pairs (i, i + rope / 2) of columns by the position over theta^(2i / rope).
Tensor turned(const Tensor& x, const ModelConfig& config) {
  const std::int64_t r = config.llama.rope_dim, half = r / 2;
  std::vector<double> cosines, sines;
  for (std::int64_t t = 0; t < kTokens; ++t) {
    for (std::int64_t i = 0; i < half; ++i) {
      const double angle =
          static_cast<double>(t) /
          std::pow(config.llama.rope_theta,
                   2 * static_cast<double>(i) / static_cast<double>(r));
      cosines.push_back(std::cos(angle));
      sines.push_back(std::sin(angle));
    }
  }
  const Tensor c = Tensor::from_values<double>(cosines, {kTokens, half}),
               s = Tensor::from_values<double>(sines, {kTokens, half});
  const Tensor a = columns(x, 0, half), b = columns(x, half, half);
  return concat({sub(mul(a, c), mul(b, s)), add(mul(b, c), mul(a, s))}, 2);
}

/// DeepSeek-AI 2024, "DeepSeek-V2", equations 37 to 47, with q_b and kv_b by parts
/// over all heads.
Tensor replayed(const Tensor& x, const std::map<std::string, Tensor>& weight,
                const ModelConfig& config) {
  const LlamaConfig& z = config.llama;
  const std::int64_t a = config.n_head, r = z.rope_dim, p = z.head_dim - r;
  const auto norm = [&](const Tensor& y, const char* name) {
    return rms_norm(y, weight.at(name), config.layer_norm_epsilon);
  };
  const Tensor q = z.q_rank > 0
                       ? linear(norm(linear(x, weight.at("q_a_proj.weight")),
                                     "q_a_layernorm.weight"),
                                weight.at("q_b_proj.weight"))
                       : linear(x, weight.at("q_proj.weight"));
  const Tensor kv_a = linear(x, weight.at("kv_a_proj_with_mqa.weight"));
  const Tensor turns = turned(columns(kv_a, 0, r), config);
  const Tensor kv =
      linear(norm(columns(kv_a, r, z.kv_rank), "kv_a_layernorm.weight"),
             weight.at("kv_b_proj.weight"));
  std::vector<double> mask;
  for (std::int64_t i = 0; i < kTokens * kTokens; ++i) {
    mask.push_back(i % kTokens > i / kTokens ? -1e30 : 0);
  }
  const Tensor hidden = Tensor::from_values<double>(mask, {kTokens, kTokens});
  Tensors heads;
  for (std::int64_t i = 0; i < a; ++i) {
    const Tensor query = concat(
        {turned(columns(q, i * r, r), config), columns(q, a * r + i * p, p)},
        2);
    const Tensor key = concat({turns, columns(kv, i * p, p)}, 2);
    const Tensor value = columns(kv, a * p + i * z.value_dim, z.value_dim);
    const Tensor scores = scale(matmul(query, key, false, true),
                                1 / std::sqrt(static_cast<double>(r + p)));
    heads.push_back(matmul(softmax(add(scores, hidden)), value));
  }
  return linear(concat(heads, 2), weight.at("o_proj.weight"));
}

class LatentAttention : public testing::TestWithParam<int> {};

TEST_P(LatentAttention, EqualsTheReplayWithItsGradients) {
  ModelConfig config = small_deepseek();
  config.llama.q_rank = GetParam();
  InitOptions init = f64_init();
  GptAttention layer("model.layers.0.self_attn", config, init);
  const Tensor x = noise({kBatch, kTokens, config.n_embd}, 1, -1, 1, kOfF64);
  const auto run = [&](bool is_replay) {
    std::map<std::string, Tensor> weight;
    for (const NamedTensor& each : layer.named_parameters()) {
      each.tensor.clear_grad();
      weight[each.name] = each.tensor;
    }
    const Tensor in = x.clone().set_requires_grad();
    const Tensor y = is_replay ? replayed(in, weight, config) : layer(in);
    weighted_sum(y).backward();
    Tensors all = {y.detach(), in.grad()};
    for (const auto& [name, tensor] : weight) all.push_back(tensor.grad());
    return all;
  };
  const Tensors own = run(false);
  EXPECT_EQ(own.size(), GetParam() > 0 ? 9u : 7u);
  expect_close(own, run(true), 1e-12);
}

INSTANTIATE_TEST_SUITE_P(RanksOfQueries, LatentAttention,
                         testing::Values(0, 20));

TEST(LatentAttention, KeepsWhatItsRowsSay) {
  const ModelConfig config = small_deepseek();
  const OwnDevice own;
  GptBlock block("model.layers.0", config, f64_init());
  const Tensor x = noise({kBatch, kTokens, config.n_embd}, 1, -1, 1, kOfF64)
                       .set_requires_grad();
  block(x);  // which makes the table of angles
  const auto before = own.device.memory().current_total;
  const Tensor y = block(x);
  double kept = 0;
  for (const BlockPart& part : block_table(config, 0).parts()) {
    kept += part.kept() + part.statistics();
  }
  // The caller has x, and y is the next block's
  const auto rows = kBatch * kTokens;
  EXPECT_EQ(static_cast<double>(own.device.memory().current_total - before -
                                y.bytes()) +
                static_cast<double>(x.bytes()),
            8 * static_cast<double>(rows) * kept);
}

// z = norm_2(y): y + mlp(z) + (silu(z gate) * (z up)) down
TEST(SharedExpert, IsAddedToTheChosenOnes) {
  const ModelConfig config = small_deepseek();
  GptBlock block("model.layers.1", config, f64_init());
  const Tensor x = noise({kBatch, kTokens, config.n_embd}, 1, -1, 1, kOfF64);
  std::map<std::string, Tensor> weight;
  for (const NamedTensor& each : block.named_parameters()) {
    weight[each.name] = each.tensor;
  }
  const Tensor y = add(x, block.attn(block.ln_1(x)));
  const Tensor z = block.ln_2(y);
  const std::string name = "mlp.shared_experts.";
  const Tensor up = linear(z, weight.at(name + "gate_up_proj.weight"));
  EXPECT_EQ(up.size(2), 2 * 32);
  const Tensor gate = columns(up, 0, 32);
  const Tensor shared =
      linear(mul(mul(gate, sigmoid(gate)), columns(up, 32, 32)),
             weight.at(name + "down_proj.weight"));
  expect_close(block(x), add(add(y, block.mlp(z)), shared), 1e-12);
  // The first block has none
  EXPECT_FALSE(
      GptBlock("model.layers.0", config, f64_init()).shared_expert.has_value());
}

// On shapes, where experts are chosen evenly
TEST(LatentAttention, BlocksComputeWhatTheirRowsSay) {
  const ModelConfig config = small_deepseek();
  RankContext context(Device::meta());
  const RankContext::Scope scope(context);
  constexpr std::int64_t kSeq = 8;
  for (const std::int64_t index : {0, 1}) {
    GptBlock block("model.layers." + std::to_string(index), config, f64_init());
    const Tensor x =
        Tensor::empty({kBatch, kSeq, config.n_embd}, {DType::kF64, Device()})
            .set_requires_grad();
    const auto seen = std::make_shared<SeenOps>();
    context.add_observer(seen);
    const Tensor y = block(x);
    const auto products = [&] {
      return seen->flops_of("linear") + seen->flops_of("matmul") +
             seen->flops_of("attention");
    };
    double forward = 0, backward = 0;
    for (const BlockPart& part : block_table(config, index).parts()) {
      forward += kBatch * kSeq * part.operations(kSeq);
      backward += kBatch * kSeq * part.backward_operations(kSeq);
    }
    EXPECT_EQ(products(), forward);
    sum(y).backward();
    EXPECT_EQ(products(), forward + backward);
    context.remove_observer(seen);
  }
}

}  // namespace
}  // namespace shardbook
