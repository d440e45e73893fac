// Routing: capacity, choices, slots, on the host alone.

#include "chapters/13_moe/routing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "tests/core/support.h"

namespace shardbook::moe {
namespace {

constexpr std::int64_t kRouted = 40, kChoices = 5;

GateOptions routing_gate(std::int64_t k, std::int64_t experts = kChoices) {
  GateOptions options;
  options.k = k;
  options.num_experts = experts;
  options.min_capacity = 1;
  return options;
}

GateValues values_of(const Tensor& logits) {
  return {softmax(logits).to_vector<double>(), logits.to_vector<double>()};
}
GateValues noisy_values(std::uint64_t seed = 1) {
  return values_of(noise({kRouted, kChoices}, seed, -2, 2));
}

TokenDraws draws_at(std::uint64_t step = 0, BatchSlice batch = {}) {
  RandomState random;
  random.step = step;
  random.batch = batch;
  return TokenDraws("gate", random, /*per_row=*/8);
}

Routing route(const GateValues& values, const GateOptions& options,
              std::int64_t slots, bool is_training = true,
              std::uint64_t step = 0) {
  Routing routing = choose_experts(
      values,
      static_cast<std::int64_t>(values.gates.size()) / options.num_experts,
      options, draws_at(step), is_training);
  take_slots(routing, slots, values.gates, options, draws_at(step),
             is_training);
  return routing;
}

TEST(Capacity, IsComputedInDouble) {
  GateOptions options = routing_gate(1, 1);
  options.capacity_factor = 1.2;
  // f32 makes 30.000001 of it
  EXPECT_EQ(capacity(25, options, true), 30);
  options = routing_gate(2, 8);
  options.capacity_factor = 1.25;
  EXPECT_EQ(capacity(100, options, true), 32);
  options = routing_gate(1, 8);
  options.min_capacity = 4;
  EXPECT_EQ(capacity(16, options, true), 4);
  EXPECT_EQ(capacity(64, options, true), 8);
  options.eval_capacity_factor = 2;
  EXPECT_EQ(capacity(64, options, false), 16);
}

// In double 100 x 1.1 is 110.00000000000001: rounding must not add a slot.
TEST(Capacity, ForgivesOneRounding) {
  GateOptions options = routing_gate(1, 1);
  options.capacity_factor = 1.1;
  EXPECT_EQ(capacity(100, options, true), 110);
  options.capacity_factor = 1.101;
  EXPECT_EQ(capacity(100, options, true), 111);
}

class RoutingOf : public testing::TestWithParam<int> {};

TEST_P(RoutingOf, EveryChoiceIsKeptOrDroppedAndNoExpertOverflows) {
  for (DropPolicy policy : {DropPolicy::kProbs, DropPolicy::kPosition}) {
    GateOptions options = routing_gate(GetParam());
    options.drop_policy = policy;
    const Routing routing = route(noisy_values(), options, 6);
    EXPECT_EQ(routing.num_kept() + routing.num_dropped(), kRouted * GetParam());
    EXPECT_GT(routing.num_dropped(), 0);
    std::set<std::pair<std::int64_t, std::int64_t>> taken;
    for (std::size_t i = 0; i < routing.slot.size(); ++i) {
      if (routing.slot[i] < 0) continue;
      EXPECT_LT(routing.slot[i], 6);
      EXPECT_TRUE(taken.insert({routing.expert[i], routing.slot[i]}).second);
    }
    // Slots are taken from the first one on, with none left out
    const std::vector<std::int64_t> counts = routing.exp_counts();
    for (std::int64_t e = 0; e < kChoices; ++e) {
      const auto here =
          std::count_if(taken.begin(), taken.end(),
                        [&](auto& each) { return each.first == e; });
      EXPECT_EQ(here, std::min<std::int64_t>(6, counts[at(e)]));
      for (std::int64_t c = 0; c < here; ++c)
        EXPECT_EQ(taken.count({e, c}), 1U);
    }
  }
}

TEST_P(RoutingOf, ATokenNeverChoosesAnExpertTwice) {
  const Routing routing = route(noisy_values(), routing_gate(GetParam()), 6);
  for (std::int64_t s = 0; s < kRouted; ++s) {
    const auto* chosen = routing.expert.data() + s * GetParam();
    EXPECT_EQ(std::set<std::int64_t>(chosen, chosen + GetParam()).size(),
              at(GetParam()));
  }
}

INSTANTIATE_TEST_SUITE_P(Choices, RoutingOf, testing::Values(1, 2, 3, 4));

TEST(TopOne, TiesGoToTheLowestExpertAndTheFirstTokenStays) {
  GateOptions options = routing_gate(1, 3);
  options.use_rts = false;
  const GateValues values = values_of(Tensor::zeros({4, 3}, {DType::kF64, {}}));
  const Routing routing = route(values, options, 2);
  EXPECT_EQ(routing.expert, (std::vector<std::int64_t>{0, 0, 0, 0}));
  EXPECT_EQ(routing.slot, (std::vector<std::int64_t>{0, 1, -1, -1}));
}

TEST(TopOne, RandomTokensStayAndSlotsFollowTheOrderOfTokens) {
  const GateValues values =
      values_of(Tensor::zeros({kRouted, kChoices}, {DType::kF64, {}}));
  std::set<std::vector<std::int64_t>> seen;
  for (std::uint64_t step = 0; step < 4; ++step) {
    const Routing routing = route(values, routing_gate(1), 6, true, step);
    std::vector<std::int64_t> kept;
    for (const std::int64_t slot : routing.slot) {
      if (slot >= 0) kept.push_back(slot);
    }
    EXPECT_EQ(kept, (std::vector<std::int64_t>{0, 1, 2, 3, 4, 5}));
    seen.insert(routing.slot);
  }
  EXPECT_EQ(seen.size(), 4U);
  // Evaluation draws nothing: the first tokens stay
  const Routing routing = route(values, routing_gate(1), 6, false);
  EXPECT_EQ(routing.slot[5], 5);
  EXPECT_EQ(routing.slot[6], -1);
}

TEST(TopOne, NoiseSamplesTheChoiceInTrainingOnly) {
  GateOptions options = routing_gate(1);
  options.noise = Noise::kRSample;
  const GateValues values = noisy_values();
  EXPECT_NE(route(values, options, kRouted).expert,
            route(values, routing_gate(1), kRouted).expert);
  EXPECT_EQ(route(values, options, kRouted, false).expert,
            route(values, routing_gate(1), kRouted).expert);
}

/// Tokens with this softmax.
GateValues values_of_shares(const std::vector<double>& shares,
                            std::int64_t tokens) {
  std::vector<double> logits;
  for (std::int64_t s = 0; s < tokens; ++s) {
    for (const double share : shares) logits.push_back(std::log(share));
  }
  return values_of(Tensor::from_values<double>(
      logits, {tokens, static_cast<std::int64_t>(shares.size())}));
}

// The largest of logits plus Gumbel noise is a sample of their softmax. Noise
// of the other sign gives 63%, 31% and 6%. Limits: 5 standard deviations.
TEST(TopOne, SampledChoicesFollowTheSoftmax) {
  constexpr std::int64_t kDrawn = 10000;
  GateOptions options = routing_gate(1, 3);
  options.noise = Noise::kRSample;
  const auto counts = choose_experts(values_of_shares({0.6, 0.3, 0.1}, kDrawn),
                                     kDrawn, options, draws_at(), true)
                          .exp_counts();
  EXPECT_NEAR(static_cast<double>(counts[0]), 6000, 245);
  EXPECT_NEAR(static_cast<double>(counts[1]), 3000, 230);
  EXPECT_NEAR(static_cast<double>(counts[2]), 1000, 150);
}

TEST(TopTwo, SampledSecondChoicesFollowTheSoftmaxOfTheRest) {
  constexpr std::int64_t kDrawn = 10000;
  const Routing routing =
      choose_experts(values_of_shares({0.9, 0.06, 0.03, 0.01}, kDrawn), kDrawn,
                     routing_gate(2, 4), draws_at(), true);
  const auto counts = routing.exp_counts();
  EXPECT_EQ(counts[0], kDrawn);  // the first choice is not sampled
  EXPECT_NEAR(static_cast<double>(counts[1]), 6000, 245);
  EXPECT_NEAR(static_cast<double>(counts[2]), 3000, 230);
  EXPECT_NEAR(static_cast<double>(counts[3]), 1000, 150);
}

TEST(TopTwo, SecondChoicesQueueBehindAllFirstOnes) {
  GateOptions options = routing_gate(2, 2);
  options.second_expert_sampling = false;
  // Token 0 prefers expert 0, tokens 1 and 2 expert 1
  const GateValues values =
      values_of(Tensor::from_values<double>({1, 0, 0, 1, 0, 1}, {3, 2}));
  const Routing routing = route(values, options, 2);
  EXPECT_EQ(routing.expert, (std::vector<std::int64_t>{0, 1, 1, 0, 1, 0}));
  // Expert 1: tokens 1 and 2 first, then token 0, which finds it full
  EXPECT_EQ(routing.slot, (std::vector<std::int64_t>{0, -1, 0, 1, 1, -1}));
}

TEST(TopTwo, SecondChoicesAreSampledInTrainingOnly) {
  GateOptions greedy = routing_gate(2);
  greedy.second_expert_sampling = false;
  const GateValues values = noisy_values();
  const Routing sampled = route(values, routing_gate(2), kRouted);
  const Routing best = route(values, greedy, kRouted);
  EXPECT_NE(sampled.expert, best.expert);
  EXPECT_EQ(route(values, routing_gate(2), kRouted, false).expert, best.expert);
  for (std::int64_t s = 0; s < kRouted; ++s) {
    EXPECT_EQ(sampled.expert[at(2 * s)], best.expert[at(2 * s)]);
  }
}

// DeepSpeed once ranked raw logits together with zeros for tokens that had not
// chosen the expert: negative logits ranked below those zeros.
TEST(TopK, RanksByProbabilityAmongThoseThatChose) {
  GateOptions options = routing_gate(3, 4);
  const GateValues values = values_of(Tensor::from_values<double>(
      {-1, -2, -3, -9, -1, -2, -9, -3, -5, -1, -2, -3}, {3, 4}));
  const Routing routing = route(values, options, 2);
  EXPECT_EQ(routing.num_kept(), 8);
  // Expert 1 has all three; the least probable loses
  std::vector<bool> kept;
  for (std::size_t i = 0; i < routing.expert.size(); ++i) {
    if (routing.expert[i] == 1) kept.push_back(routing.slot[i] >= 0);
  }
  EXPECT_EQ(kept.size(), 3U);
  EXPECT_EQ(std::count(kept.begin(), kept.end(), true), 2);
  EXPECT_TRUE(kept[2]);  // its first choice
}

// Token 0 has the larger logit for expert 0, token 1 the larger probability.
TEST(TopK, RanksByProbabilityNotByLogit) {
  const GateValues values = values_of(
      Tensor::from_values<double>({5, 4, 3, -9, -1, -9, -9.5, -10}, {2, 4}));
  const Routing routing = route(values, routing_gate(3, 4), 1);
  EXPECT_EQ(routing.expert, (std::vector<std::int64_t>{0, 1, 2, 0, 1, 2}));
  EXPECT_EQ(routing.slot, (std::vector<std::int64_t>{-1, 0, 0, 0, -1, -1}));
}

TEST(TopK, TiesGoToTheLowestExperts) {
  for (const std::int64_t k : {2, 3}) {
    GateOptions options = routing_gate(k, 4);
    options.second_expert_sampling = false;
    const GateValues values =
        values_of(Tensor::zeros({2, 4}, {DType::kF64, {}}));
    const Routing routing = route(values, options, 2);
    for (std::size_t i = 0; i < routing.expert.size(); ++i) {
      EXPECT_EQ(routing.expert[i], static_cast<std::int64_t>(i) % k) << k;
    }
  }
}

TEST(TopK, ByPositionTheFirstTokensStay) {
  GateOptions options = routing_gate(3, 3);
  options.drop_policy = DropPolicy::kPosition;
  const Routing routing = route(values_of(noise({4, 3})), options, 2);
  for (std::size_t i = 0; i < 12; ++i) EXPECT_EQ(routing.slot[i] >= 0, i < 6);
}

// Where ranks share samples, each token of a part draws as in the whole.
TEST(TokenDraws, FollowTheTokenIntoPartsOfItsSample) {
  const TokenDraws whole = draws_at(4);
  RandomState random;
  random.step = 4;
  const std::vector<std::int64_t> zigzag = {0, 1, 6, 7};
  const TokenDraws part("gate", random, 4, SamplePart{8, zigzag});
  for (std::int64_t row = 0; row < 3; ++row) {
    for (std::int64_t i = 0; i < 4; ++i) {
      const std::int64_t token = row * 8 + zigzag[at(i)];
      EXPECT_EQ(part.uniform("rts", row * 4 + i), whole.uniform("rts", token));
    }
  }
  EXPECT_THROW(TokenDraws("gate", random, 3, SamplePart{8, zigzag}), Error);
}

TEST(TokenDraws, FollowTheTokenNotTheRank) {
  // Row 1 of a rank that takes every third row from 2 on is row 5 of the batch
  const TokenDraws rank = draws_at(4, BatchSlice{2, 3});
  const TokenDraws whole = draws_at(4);
  EXPECT_EQ(rank.uniform("rts", 8 + 3), whole.uniform("rts", 5 * 8 + 3));
  EXPECT_NE(rank.uniform("rts", 3), whole.uniform("rts", 3));
  EXPECT_NE(whole.uniform("rts", 3), whole.uniform("second", 3));
  EXPECT_NE(whole.uniform("rts", 3), draws_at(5).uniform("rts", 3));
}

TEST(SortByExpert, KeepsTheOrderOfTokens) {
  const Routing routing = route(noisy_values(), routing_gate(2), kRouted);
  const SortedChoices sorted = sort_by_expert(routing);
  EXPECT_EQ(sorted.counts, routing.exp_counts());
  std::int64_t expert = -1, last = -1;
  for (const std::int64_t choice : sorted.choice) {
    const std::int64_t now = routing.expert[at(choice)];
    if (now == expert) {
      EXPECT_GT(choice, last);
    } else {
      EXPECT_GT(now, expert);
    }
    expert = now, last = choice;
  }
}

TEST(DrawExperts, IsEven) {
  const GateOptions options = routing_gate(2);
  const Routing routing = draw_experts(8000, options, draws_at());
  for (const std::int64_t count : routing.exp_counts()) {
    // 3200 expected; 5 standard deviations of a binomial
    EXPECT_NEAR(static_cast<double>(count), 3200, 220);
  }
}

TEST(CheckGate, NamesWhatDoesNotWork) {
  GateOptions options = routing_gate(6);
  EXPECT_THROW(check_gate(options), Error);
  options = routing_gate(2);
  options.noise = Noise::kRSample;
  EXPECT_THROW(check_gate(options), Error);
  options = routing_gate(1);
  options.num_experts = 999999999;  // lists this long would fill the memory
  EXPECT_THROW(check_gate(options), Error);
}

}  // namespace
}  // namespace shardbook::moe
