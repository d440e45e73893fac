// Weights and losses of the gate; the index form against the dense one.

#include <algorithm>
#include <cmath>
#include <set>

#include "chapters/13_moe/gate.h"

#include "chapters/13_moe/dispatch.h"
#include "tests/core/support.h"

namespace shardbook::moe {
namespace {

constexpr std::int64_t kTokens = 24, kWidth = 6, kExperts = 4;

GateOptions gate_of(std::int64_t k, double factor = 1) {
  GateOptions options;
  options.k = k;
  options.num_experts = kExperts;
  options.min_capacity = 1;
  options.capacity_factor = factor;
  return options;
}

TopKGate make_gate(const GateOptions& options) {
  TopKGate gate("gate", kWidth, options, f64_init());
  gate.weight.copy_from(noise({kWidth, kExperts}, 5));
  return gate;
}

GateCall call_of() {
  GateCall call;
  call.name = "gate";
  call.per_row = 8;
  return call;
}

/// Tokens, a gate's result for them, and its probabilities.
struct Gated {
  explicit Gated(const GateOptions& options, const GateCall& call = call_of())
      : gate(make_gate(options)), result(gate.route(x, call)) {}

  const Tensor x = noise({kTokens, kWidth}, 2, -2, 2);
  const TopKGate gate;
  const GateResult result;
  const Routing& routing = result.routing;
  const Tensor gates = softmax(matmul(x, gate.weight));
  const std::vector<double> weights = result.weights.to_vector<double>();
};

class GateWeights : public testing::TestWithParam<int> {};

TEST_P(GateWeights, AreSharesOfTheKeptChoices) {
  const std::int64_t k = GetParam();
  const Gated gated(gate_of(k, 0.7));
  const Routing& routing = gated.routing;
  const auto gates = gated.gates.to_vector<double>();
  EXPECT_GT(routing.num_dropped(), 0);
  for (std::int64_t s = 0; s < kTokens; ++s) {
    double sum = 0, kept = 0;
    for (std::int64_t j = 0; j < k; ++j) {
      const auto choice = at(s * k + j);
      sum += gated.weights[choice];
      if (!routing.is_kept(s, j)) {
        EXPECT_EQ(gated.weights[choice], 0);
        continue;
      }
      kept += gates[at(s * kExperts + routing.expert[choice])];
    }
    // Top-1: the gate's probability. Else shares, which add up to 1
    EXPECT_NEAR(sum, k == 1 ? kept : (kept > 0 ? 1 : 0), 1e-14);
  }
}

TEST_P(GateWeights, IndexFormEqualsTheDenseForm) {
  const std::int64_t k = GetParam();
  const TopKGate gate = make_gate(gate_of(k, 0.8));
  const auto run = [&](bool is_naive) {
    const Tensor x = leaf({kTokens, kWidth}, 3);
    gate.weight.clear_grad();
    const GateResult result = gate.route(x, call_of());
    const Routing& routing = result.routing;
    const Tensor rows =
        is_naive ? naive_dispatch(x, routing) : dispatch(x, routing);
    // An expert with a bias: empty slots do not stay zero
    const Tensor outputs = add_scalar(mul(rows, rows), 0.5);
    const Tensor y = is_naive ? naive_combine(outputs, routing, result.weights)
                              : combine(outputs, routing, result.weights);
    weighted_sum(y).backward();
    return Tensors{rows.detach(), y.detach(), x.grad(), gate.weight.grad()};
  };
  const Tensors dense = run(true), index = run(false);
  for (std::size_t i = 0; i < dense.size(); ++i) {
    EXPECT_LT(max_abs_difference(dense[i], index[i]), 1e-13) << i;
  }
}

TEST_P(GateWeights, GradientsAreThoseOfDifferences) {
  const std::int64_t k = GetParam();
  const GateOptions options = gate_of(k, 2);
  const double error = autograd::check_gradients(
      [&](const Tensors& in) {
        TopKGate gate("gate", kWidth, options, f64_init());
        gate.weight = in[1];
        GateCall call = call_of();
        call.wants_z_loss = true;
        const GateResult result = gate.route(in[0], call);
        const Tensor y = combine(dispatch(in[0], result.routing),
                                 result.routing, result.weights);
        return add(weighted_sum(y), add(result.l_aux, result.z_loss));
      },
      {leaf({kTokens, kWidth}, 7), leaf({kWidth, kExperts}, 8)});
  EXPECT_LT(error, 1e-6);
}

INSTANTIATE_TEST_SUITE_P(Choices, GateWeights, testing::Values(1, 2, 3));

TEST(AuxiliaryLoss, IsOneForAnEvenLoad) {
  TopKGate gate = make_gate(gate_of(1));
  gate.weight.copy_from(Tensor::zeros({kWidth, kExperts}, {DType::kF64, {}}));
  // All gates 1/E: me is even, so for every ce the loss is 1
  const GateResult result = gate.route(noise({kTokens, kWidth}), call_of());
  EXPECT_NEAR(result.l_aux.item(), 1, 1e-14);
}

/// E sum_e me_e ce_e; ce counts the first `counted` choices of each token.
double auxiliary_loss(const Tensor& gates, const Routing& routing,
                      std::int64_t counted) {
  std::vector<double> ce(kExperts, 0);
  for (std::int64_t s = 0; s < kTokens; ++s) {
    for (std::int64_t j = 0; j < counted; ++j) {
      const auto expert = routing.expert[at(s * routing.k + j)];
      if (expert < 0) continue;
      ce[at(expert)] += 1.0 / static_cast<double>(kTokens * counted);
    }
  }
  const auto me = mean(gates, 0).to_vector<double>();
  double sum = 0;
  for (std::size_t e = 0; e < me.size(); ++e) sum += me[e] * ce[e];
  return static_cast<double>(kExperts) * sum;
}

TEST(AuxiliaryLoss, CountsFirstChoicesBeforeDropping) {
  for (std::int64_t k : {1, 2, 3}) {
    const Gated gated(gate_of(k, 0.3));
    EXPECT_NEAR(gated.result.l_aux.item(),
                auxiliary_loss(gated.gates, gated.routing, k > 2 ? k : 1),
                1e-13)
        << k;
  }
}

// Padding chooses no expert, yet me and ce are fractions of all S tokens.
TEST(AuxiliaryLoss, PaddingIsNotRoutedAndCountsAsTokens) {
  GateCall call = call_of();
  call.used_token.assign(at(kTokens), true);
  const std::set<std::size_t> padding = {3, 7, 8};
  for (const std::size_t s : padding) call.used_token[s] = false;
  const Gated gated(gate_of(1, 4), call);
  for (std::size_t s = 0; s < gated.weights.size(); ++s) {
    const bool is_padding = padding.count(s) > 0;
    EXPECT_EQ(gated.routing.expert[s] < 0, is_padding) << s;
    EXPECT_TRUE(!is_padding || gated.weights[s] == 0) << s;
  }
  EXPECT_NEAR(gated.result.l_aux.item(),
              auxiliary_loss(gated.gates, gated.routing, 1), 1e-13);
}

TEST(ZLoss, IsTheMeanSquareOfLogSumExp) {
  const TopKGate gate = make_gate(gate_of(1));
  const Tensor x = noise({kTokens, kWidth});
  GateCall call = call_of();
  EXPECT_FALSE(gate.route(x, call).z_loss.defined());
  call.wants_z_loss = true;
  const auto logits = matmul(x, gate.weight).to_vector<double>();
  double expected = 0;
  for (std::int64_t s = 0; s < kTokens; ++s) {
    double sum = 0;
    for (std::int64_t e = 0; e < kExperts; ++e) {
      sum += std::exp(logits[at(s * kExperts + e)]);
    }
    expected += std::log(sum) * std::log(sum) / static_cast<double>(kTokens);
  }
  EXPECT_NEAR(gate.route(x, call).z_loss.item(), expected, 1e-13);
}

// A weight of zero does not mean an empty slot.
TEST(DispatchMask, KeepsTokensWhoseWeightUnderflows) {
  const TopKGate gate = make_gate(gate_of(1, 2));
  const Tensor x = noise({kTokens, kWidth}, 2, 1, 2);
  GateResult result = gate.route(x, call_of());
  const Tensor zeros = result.weights.zeros_like();
  EXPECT_EQ(sum(combine_mask(result.routing, zeros)).item(), 0);
  EXPECT_EQ(sum(dispatch_mask(result.routing, x.options())).item(),
            static_cast<double>(result.routing.num_kept()));
  EXPECT_NEAR(sum(naive_dispatch(x, result.routing)).item(),
              sum(dispatch(x, result.routing)).item(), 1e-12);
}

// The dtype is not enough: logits or gates rounded to bf16 are off by 1e-3.
TEST(TopKGate, RoundsNothingToTheDtypeOfItsInputs) {
  InitOptions init;
  init.dtype = DType::kBF16;
  const TensorOptions narrow{DType::kBF16, Device()};
  TopKGate gate("gate", kWidth, gate_of(1, 4), init);
  gate.weight.copy_from(noise({kWidth, kExperts}, 5, -2, 2, narrow));
  const Tensor x = noise({kTokens, kWidth}, 1, -1, 1, narrow);
  const GateResult result = gate.route(x, call_of());
  const auto gates = softmax(matmul(to_dtype(x, DType::kF32),
                                    to_dtype(gate.weight, DType::kF32)))
                         .to_vector<double>();
  const auto weights = result.weights.to_vector<double>();
  for (std::size_t s = 0; s < weights.size(); ++s) {
    const auto expert = at(result.routing.expert[s]);
    EXPECT_NEAR(weights[s], gates[s * kExperts + expert], 1e-6);
  }
}

TEST(TopKGate, JitterAndNoiseChangeTrainingAlone) {
  for (Noise noise_kind : {Noise::kJitter, Noise::kNoisyTopK}) {
    GateOptions options = gate_of(1, 4);  // no drops
    options.eval_capacity_factor = 4;
    const Tensor x = noise({kTokens, kWidth});
    const Tensor plain = make_gate(options).route(x, call_of()).weights;
    options.noise = noise_kind;
    const TopKGate gate = make_gate(options);
    GateCall call = call_of();
    EXPECT_GT(max_abs_difference(gate.route(x, call).weights, plain), 1e-6);
    // The same step draws the same again
    EXPECT_TRUE(bitwise_equal(gate.route(x, call).weights,
                              gate.route(x, call).weights));
    call.is_training = false;
    EXPECT_TRUE(bitwise_equal(gate.route(x, call).weights, plain));
  }
}

constexpr std::int64_t kDrawnTokens = 4000;

/// A gate of two experts with room for all; a token is a single number.
TopKGate narrow_gate(Noise kind, const std::vector<double>& weight) {
  GateOptions options = gate_of(1, 2);
  options.num_experts = 2;
  options.noise = kind;
  TopKGate gate("gate", 1, options, f64_init());
  gate.weight.copy_from(Tensor::from_values<double>(weight, {1, 2}));
  return gate;
}

// Tokens of 1 and logits (1, 0): a weight's logit is the factor of its token.
TEST(TopKGate, JitterIsUniformWithinOnePercent) {
  const TopKGate gate = narrow_gate(Noise::kJitter, {1, 0});
  const Tensor x = Tensor::full({kDrawnTokens, 1}, 1, {DType::kF64, {}});
  double least = 2, most = 0, sum = 0;
  for (const double p : gate.route(x, call_of()).weights.to_vector<double>()) {
    const double factor = std::log(p / (1 - p));
    least = std::min(least, factor), most = std::max(most, factor);
    sum += factor;
  }
  EXPECT_GE(least, 0.99 - 1e-12);
  EXPECT_LE(most, 1.01 + 1e-12);
  EXPECT_LT(least, 0.9901);
  EXPECT_GT(most, 1.0099);
  EXPECT_NEAR(sum / static_cast<double>(kDrawnTokens), 1, 5e-4);
}

// Logits of 0; expert 1's noise has no spread, expert 0's has softplus(1).
TEST(TopKGate, NoisyTopKAddsNormalsTimesASoftplus) {
  TopKGate gate = narrow_gate(Noise::kNoisyTopK, {0, 0});
  gate.noise_weight.copy_from(Tensor::from_values<double>({1, -50}, {1, 2}));
  const Tensor x = Tensor::full({kDrawnTokens, 1}, 1, {DType::kF64, {}});
  const GateResult result = gate.route(x, call_of());
  const auto weights = result.weights.to_vector<double>();
  const double spread = std::log1p(std::exp(1.0));
  double sum = 0, squares = 0;
  for (std::size_t s = 0; s < weights.size(); ++s) {
    const double away = std::log(weights[s] / (1 - weights[s])) / spread;
    const double normal = result.routing.expert[s] == 0 ? away : -away;
    sum += normal, squares += normal * normal;
  }
  const auto n = static_cast<double>(kDrawnTokens);
  EXPECT_NEAR(sum / n, 0, 0.08);  // 5 standard deviations
  EXPECT_NEAR(squares / n, 1, 0.12);
}

// Noise affects the choice of experts, not the weights.
TEST(TopKGate, SampledChoicesWeighTheirCleanProbabilities) {
  GateOptions options = gate_of(1, 4);
  options.noise = Noise::kRSample;
  const Gated gated(options);
  const auto gates = gated.gates.to_vector<double>();
  int unlikely = 0;
  for (std::size_t s = 0; s < gated.weights.size(); ++s) {
    const double* row = gates.data() + s * kExperts;
    const double weight = gated.weights[s];
    EXPECT_NEAR(weight, row[gated.routing.expert[s]], 1e-14);
    unlikely += weight < *std::max_element(row, row + kExperts) ? 1 : 0;
  }
  EXPECT_GT(unlikely, 0);
}

TEST(TopKGate, WithoutDroppingTheBusiestExpertSetsTheSlots) {
  GateOptions options = gate_of(1);
  options.drop_tokens = false;
  const TopKGate gate = make_gate(options);
  const Tensor x = noise({kTokens, kWidth}, 2, -2, 2);
  GateCall call = call_of();
  const Routing routing = gate.route(x, call).routing;
  const auto counts = routing.exp_counts();
  EXPECT_EQ(routing.capacity, *std::max_element(counts.begin(), counts.end()));
  EXPECT_EQ(routing.num_dropped(), 0);
  // Another rank has more; and the slots must divide by TP = 4
  call.max_over_ranks = [](std::int64_t) { return 21; };
  call.capacity_multiple = 4;
  EXPECT_EQ(gate.route(x, call).routing.capacity, 24);
}

}  // namespace
}  // namespace shardbook::moe
