// A layer of experts on ranks against the same layer on one device.

#include "chapters/13_moe/moe_layer.h"

#include "chapters/13_moe/dispatch.h"
#include "comm/device_mesh.h"
#include "tests/chapters/13_moe/moe_support.h"

namespace shardbook::moe {
namespace {

constexpr std::int64_t kSamples = 2, kTokensEach = 12;

MoeOptions options_of(std::int64_t k = 1, std::int64_t experts = 8) {
  MoeOptions options;
  options.gate.k = k;
  options.gate.num_experts = experts;
  options.gate.min_capacity = 2;
  options.gate.second_expert_sampling = false;
  return options;
}

/// The gate's result for these rows.
GateResult gated_by(const MoeLayer& layer, const Tensor& rows,
                    bool wants_z_loss = false) {
  GateCall call;
  call.name = std::string(kName) + ".gate";
  call.per_row = kTokensEach;
  call.wants_z_loss = wants_z_loss;
  return layer.gate.route(reshape(rows, {-1, kLayerWidth}), call);
}

/// Each rank's own tokens.
Tensor input_of(int rank) {
  return leaf({kSamples, kTokensEach, kLayerWidth},
              100 + static_cast<std::uint64_t>(rank));
}

/// Output of a rank's tokens, and the gradient of the input.
template <typename Forward>
Tensors run(Forward&& forward, int rank, int ranks) {
  RankContext::current().random.batch = {rank, ranks};
  const Tensor x = input_of(rank);
  const Tensor y = forward(x);
  weighted_sum(y).backward();
  return {y.detach(), x.grad()};
}

/// The same on one device, which computes each rank's tokens separately.
template <typename Forward>
std::vector<Tensors> one_device(Forward&& forward, int ranks) {
  const ContextValue<RandomState> as_new_ranks(&RankContext::random, {});
  std::vector<Tensors> results;
  for (int rank = 0; rank < ranks; ++rank) {
    results.push_back(run(forward, rank, ranks));
  }
  return results;
}

/// Gradients of all parameters, in order.
Tensors gradients_of(MoeLayer& layer) {
  Tensors all;
  for (const Tensor& p : layer.parameters()) all.push_back(p.grad());
  return all;
}

struct Case {
  int ep = 1;
  std::int64_t k = 1;
  bool dropless = false;
  bool drop_tokens = true;
};

class MoeLayerOnRanks : public testing::TestWithParam<Case> {};

TEST_P(MoeLayerOnRanks, EqualsOneDevice) {
  const Case& c = GetParam();
  MoeOptions options = options_of(c.k, c.ep == 3 ? 6 : 8);
  options.is_dropless = c.dropless;
  options.gate.drop_tokens = c.drop_tokens;
  MoeOptions reference = options;
  reference.is_naive = !c.dropless;
  MoeLayer alone = make_layer(reference, {});
  const auto expected = one_device(alone, c.ep);
  const Tensors sums = gradients_of(alone);
  const auto found = on_ranks(c.ep, [&](ProcessGroup& world) {
    MoeLayer layer = make_layer(options, {&world, nullptr});
    Tensors results = run(layer, world.rank(), c.ep);
    for (const Tensor& each : gradients_of(layer)) results.push_back(each);
    // Gates are replicated: their gradients are partial sums
    world.all_reduce(results[2]).wait();
    return results;
  });
  const std::int64_t local = options.gate.num_experts / c.ep;
  for (int rank = 0; rank < c.ep; ++rank) {
    const Tensors& here = found[at(rank)];
    const Tensors& there = expected[at(rank)];
    EXPECT_LT(max_abs_difference(here[0], there[0]), 1e-14) << "y";
    EXPECT_LT(max_abs_difference(here[1], there[1]), 1e-13) << "dx";
    EXPECT_LT(max_abs_difference(here[2], sums[0]), 1e-12) << "gate";
    // Experts have seen the tokens of all ranks of their group
    for (std::size_t i = 3; i < here.size(); ++i) {
      EXPECT_LT(
          max_abs_difference(
              here[i], sums[i - 2].rows_view(rank * local, (rank + 1) * local)),
          1e-12)
          << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Groups, MoeLayerOnRanks,
    testing::Values(Case{1, 1}, Case{2, 1}, Case{4, 1}, Case{8, 1}, Case{3, 2},
                    Case{4, 2}, Case{2, 3}, Case{1, 2, true}, Case{2, 1, true},
                    Case{4, 2, true}, Case{8, 1, true}, Case{3, 3, true},
                    Case{4, 1, false, false}, Case{2, 2, false, false}));

// 8 experts on 4 ranks, and one token on each: most experts see none.
TEST(MoeLayer, ExpertsWithoutTokensJoinAllCollectives) {
  for (bool dropless : {false, true}) {
    MoeOptions options = options_of();
    options.is_dropless = dropless;
    const auto outputs = on_ranks(4, [&](ProcessGroup& world) {
      MoeLayer layer = make_layer(options, {&world, nullptr});
      const Tensor x = noise({1, 1, kLayerWidth}).set_requires_grad();
      const Tensor y = layer(x);
      sum(y).backward();
      return y.detach();
    });
    for (const Tensor& y : outputs) EXPECT_TRUE(bitwise_equal(y, outputs[0]));
  }
}

// S = 16, E = 8, C = 4, M = 84: 2688 elements, of which 1/2 or 3/4 travel.
TEST(MoeLayer, SendsAsManyElementsWhateverTheRouting) {
  for (int ep : {2, 4}) {
    const auto logs = on_ranks(ep, [&](ProcessGroup& world) {
      MoeLayer layer = make_layer(MoeOptions(), {&world, nullptr}, nullptr,
                                  f64_init(), config_of(84));
      const Tensor x = leaf({1, 16, 84}, 3);
      world.clear_records();
      sum(layer(x)).backward();
      return world.records();
    });
    for (const auto& log : logs) {
      ASSERT_EQ(log.size(), 4U);
      const char* const labels[] = {"dispatch", "combine", "d_combine",
                                    "d_dispatch"};
      for (std::size_t i = 0; i < 4; ++i) {
        EXPECT_EQ(log[i].op, CommOp::kAllToAll);
        EXPECT_EQ(log[i].numel, 2688);
        EXPECT_EQ(log[i].label, labels[i]);
        EXPECT_EQ(wire_elements(log[i]), ep == 2 ? 1344 : 2016);
      }
    }
  }
}

// Biases make empty slots nonzero; no token reads these slots.
TEST(MoeLayer, EmptySlotsContributeNothing) {
  MoeOptions options = options_of(1, 4);
  options.gate.capacity_factor = 3;
  options.aux_coefficient = 0;
  MoeLayer layer = make_layer(options, {});
  layer.experts.c_fc_bias.copy_from(noise({4, 4 * kLayerWidth}, 9));
  layer.experts.c_proj_bias.copy_from(noise({4, kLayerWidth}, 10));
  const Tensor x = input_of(0);
  const Tensor y = layer(x);
  sum(y).backward();
  // d/d bias of the sum: the weights of the expert's tokens
  const GateResult gated = gated_by(layer, x.detach());
  const auto weights = gated.weights.to_vector<double>();
  std::vector<double> sums(4, 0);
  for (std::size_t s = 0; s < weights.size(); ++s) {
    sums[at(gated.routing.expert[s])] += weights[s];
  }
  const auto found = layer.experts.c_proj_bias.grad().to_vector<double>();
  for (std::size_t e = 0; e < 4; ++e) {
    EXPECT_NEAR(found[e * kLayerWidth], sums[e], 1e-12);
  }
}

// A token that every expert drops gives zero: the residual stream carries it.
TEST(MoeLayer, DroppedTokensAreZero) {
  MoeOptions options = options_of(1, 4);
  options.gate.capacity_factor = 0.2;
  MoeLayer layer = make_layer(options, {});
  layer.experts.c_proj_bias.copy_from(noise({4, kLayerWidth}, 10, 1, 2));
  const Tensor y = layer(input_of(0));
  const auto values = y.to_vector<double>();
  std::int64_t zeros = 0;
  for (std::int64_t s = 0; s < kSamples * kTokensEach; ++s) {
    const std::size_t first = at(s * kLayerWidth);
    zeros += values[first] == 0 && values[first + 1] == 0 ? 1 : 0;
  }
  EXPECT_EQ(zeros, kSamples * kTokensEach - 4 * 2);  // two slots each
}

// The gradients for a user who gets the losses and adds them, with the factor
// that the main loss' backward starts from.
TEST(MoeLayer, LossesOfTheGateCountByTheirCoefficients) {
  for (const double factor : {1.0, 0.5}) {
    MoeOptions options = options_of(1, 4);
    options.aux_coefficient = 0.6, options.z_coefficient = 0.2;
    const auto record = std::make_shared<MoeRecord>();
    record->loss_scale = factor;
    MoeLayer layer = make_layer(options, {}, record);
    const Tensor x = input_of(0);
    sum(layer(x)).backward();

    options.aux_coefficient = options.z_coefficient = 0;
    MoeLayer plain = make_layer(options, {});
    const Tensor same = input_of(0);
    const GateResult gated = gated_by(plain, same, /*wants_z_loss=*/true);
    const Tensor losses =
        add(scale(gated.l_aux, 0.6), scale(gated.z_loss, 0.2));
    add(sum(plain(same)), scale(losses, factor)).backward();
    EXPECT_LT(
        max_abs_difference(layer.gate.weight.grad(), plain.gate.weight.grad()),
        1e-13);
    EXPECT_LT(max_abs_difference(x.grad(), same.grad()), 1e-13);
  }
}

TEST(MoeLayer, DefaultsAreThoseOfTheDocuments) {
  const MoeOptions options;
  EXPECT_EQ(options.aux_coefficient, 1e-2);
  EXPECT_EQ(options.z_coefficient, 0);
  EXPECT_EQ(options.gate.min_capacity, 4);
  EXPECT_TRUE(options.gate.drop_tokens && options.gate.use_rts);
  EXPECT_TRUE(options.gate.second_expert_sampling);
  EXPECT_EQ(options.gate.noise, Noise::kNone);
  EXPECT_EQ(options.gate.drop_policy, DropPolicy::kProbs);
}

TEST(MoeLayer, EvaluationHasACapacityOfItsOwn) {
  MoeOptions options = options_of(1, 4);
  options.gate.eval_capacity_factor = 2;
  const auto record = std::make_shared<MoeRecord>();
  MoeLayer layer = make_layer(options, {}, record);
  layer.train(false);
  layer(input_of(0).detach());
  // 24 tokens and 4 experts: 6 slots in training
  EXPECT_EQ(record->loads.at(kName).most_slots, 12);
}

TEST(MoeLayer, JitterReachesTheGateAlone) {
  MoeOptions options = options_of(1, 4);
  options.gate.noise = Noise::kJitter;
  MoeLayer layer = make_layer(options, {});
  const Tensor x = input_of(0).detach();
  const Tensor rows = reshape(x, {-1, kLayerWidth});
  const GateResult gated = gated_by(layer, rows);
  const Tensor expected = combine(layer.experts(dispatch(rows, gated.routing)),
                                  gated.routing, gated.weights);
  EXPECT_LT(max_abs_difference(reshape(layer(x), {-1, kLayerWidth}), expected),
            1e-15);
}

TEST(MoeLayer, ResidualAndSharedExpertsAddAnMlpForAllTokens) {
  MoeOptions residual = options_of(1, 4), shared = residual, gated = residual;
  residual.use_residual = true;
  shared.shared_expert = true;
  gated.shared_expert = gated.gate_shared_expert = true;
  const Tensor x = input_of(0).detach();
  const Tensor plain = make_layer(options_of(1, 4), {})(x);
  MoeLayer a = make_layer(residual, {}), b = make_layer(shared, {}),
           c = make_layer(gated, {});
  const Tensor dense = (*b.mlp)(x);
  EXPECT_LT(max_abs_difference(b(x), add(plain, dense)), 1e-15);
  const Tensor w = softmax(linear(x, a.coefficient_weight, a.coefficient_bias));
  const Tensor weighed =
      add(mul(plain, slice(w, 2, 0, 1)), mul(dense, slice(w, 2, 1, 2)));
  EXPECT_LT(max_abs_difference(a(x), weighed), 1e-15);
  // The shared expert may be weighed by a gate of its own
  const Tensor rows = reshape(x, {-1, kLayerWidth});
  const Tensor weights =
      reshape(sigmoid(matmul(rows, c.shared_gate)), {kSamples, kTokensEach, 1});
  EXPECT_LT(max_abs_difference(c(x), add(plain, mul(dense, weights))), 1e-15);
}

// Rows without slots against masks with a slot for every token: after the gate,
// only the experts' code is shared.
TEST(MoeLayer, DroplessIsTheFormWithSlotsForAll) {
  for (const std::int64_t k : {1, 2, 3}) {
    MoeOptions slots = options_of(k);
    slots.gate.drop_tokens = false;
    slots.is_naive = true;
    MoeOptions rows = options_of(k);
    rows.is_dropless = true;
    MoeLayer with_slots = make_layer(slots, {});
    MoeLayer with_rows = make_layer(rows, {});
    const auto expect_same = [k](const Tensors& found,
                                 const Tensors& expected) {
      ASSERT_EQ(found.size(), expected.size());
      for (std::size_t i = 0; i < found.size(); ++i) {
        EXPECT_LT(max_abs_difference(found[i], expected[i]), 1e-12)
            << "k " << k << " " << i;
      }
    };
    expect_same(run(with_rows, 0, 1), run(with_slots, 0, 1));
    expect_same(gradients_of(with_rows), gradients_of(with_slots));
  }
}

// Groups of 2 ranks in one layer, of 4 in the next.
TEST(MoeLayer, LayersMayHaveGroupsOfOtherSizes) {
  const auto two_layers = [](ProcessGroup* of_first, ProcessGroup* of_second,
                             const auto& run_both) {
    MoeLayer first = make_layer(options_of(), {of_first, nullptr});
    MoeLayer second = make_layer(options_of(), {of_second, nullptr});
    return run_both([&](const Tensor& x) { return second(first(x)); });
  };
  const auto found = on_ranks(4, [&](ProcessGroup& world) {
    DeviceMesh mesh(world, Topology({"edp", "ep"}, {2, 2}));
    return two_layers(&mesh.group("ep"), &world, [&](const auto& forward) {
      return run(forward, world.rank(), 4);
    });
  });
  const auto expected = two_layers(nullptr, nullptr, [](const auto& forward) {
    return one_device(forward, 4);
  });
  for (std::size_t rank = 0; rank < 4; ++rank) {
    EXPECT_LT(max_abs_difference(found[rank][0], expected[rank][0]), 1e-14);
    EXPECT_LT(max_abs_difference(found[rank][1], expected[rank][1]), 1e-13);
  }
}

TEST(MoeLayer, ExpertsBeginIndependentOrAsCopies) {
  MoeOptions options = options_of(1, 4);
  const Tensor own = make_layer(options, {}).experts.c_fc_weight;
  EXPECT_GT(max_abs_difference(own.rows_view(0, 1), own.rows_view(1, 2)), 0);
  options.are_copies = true;
  const Tensor copies = make_layer(options, {}).experts.c_fc_weight;
  for (std::int64_t e = 1; e < 4; ++e) {
    EXPECT_TRUE(bitwise_equal(copies.rows_view(e, e + 1).clone(),
                              copies.rows_view(0, 1).clone()));
  }
  EXPECT_GT(max_abs_difference(copies, copies.zeros_like()), 0);
}

TEST(MoeMlp, GivesEachLayerItsNumberOfExperts) {
  MoeOptions options = options_of();
  options.num_experts = {1, 2, 4};
  ModelConfig config = config_of();
  config.n_layer = 5, config.n_head = 2;
  LayerFactory layers;
  layers.mlp = moe_mlp(options, {}, std::make_shared<MoeRecord>());
  Gpt model(config, f64_init(), layers);
  EXPECT_EQ((*model.h[0].mlp).type_name(), "GptMlp");
  const std::int64_t expected[] = {0, 2, 4, 4, 4};
  for (std::size_t i = 1; i < 5; ++i) {
    EXPECT_EQ(model.h[i].mlp.as<MoeLayer>().experts.c_fc_weight.size(0),
              expected[i]);
  }
}

// Catches experts that use the tanh form even if the config does not.
TEST(MoeMlp, ExpertsHaveTheGeluOfTheConfig) {
  ModelConfig config = config_of(6);
  config.gelu = GeluForm::kErf;
  MoeOptions options;
  options.gate.num_experts = 2;
  MoeLayer layer = make_layer(options, {}, nullptr, f64_init(), config);
  Experts& experts = layer.experts;
  const Tensor rows = Tensor::empty({2, 5, 6}, {DType::kF64, Device()});
  fill_normal(rows, 1, 1, 0, 30);  // large next to weights of 0.02
  const Tensor hidden = matmul(rows, experts.c_fc_weight);
  const auto expected = [&](GeluForm form) {
    return matmul(gelu(hidden, form), experts.c_proj_weight);
  };
  const Tensor y = experts.forward(rows);
  EXPECT_LT(max_abs_difference(y, expected(GeluForm::kErf)), 1e-15);
  EXPECT_GT(max_abs_difference(y, expected(GeluForm::kTanh)), 1e-7);
}

TEST(MoeLayer, RefusesExpertsThatDoNotDivide) {
  expect_text(error_on_ranks(3,
                             [&](ProcessGroup& world) {
                               make_layer(options_of(), {&world, nullptr});
                             }),
              {"8 experts"});
}

// 24 tokens for 8 experts: 3 slots each, which 2 ranks would share.
TEST(MoeLayer, RefusesSlotsThatTensorParallelRanksCannotShare) {
  expect_text(
      error_on_ranks(2,
                     [&](ProcessGroup& world) {
                       make_layer(options_of(), {nullptr, &world})(input_of(0));
                     }),
      {"does not divide the 3 slots"});
}

}  // namespace
}  // namespace shardbook::moe
