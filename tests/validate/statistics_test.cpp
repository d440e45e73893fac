#include <gtest/gtest.h>

#include <cmath>

#include "bench/validate/kinds.h"
#include "core/check.h"

namespace shardbook::validate {
namespace {

TEST(Mape, IsTheMeanOfAbsoluteErrors) {
  const std::vector<Pair> pairs = {
      {110, 100, 1, ""}, {90, 100, 1, ""}, {50, 50, 1, ""}};
  EXPECT_NEAR(mape(pairs), 0.2 / 3, 1e-12);
  EXPECT_NEAR(worst_error(pairs), 0.1, 1e-12);
  EXPECT_NEAR(relative_error(pairs[1]), -0.1, 1e-12);
  EXPECT_EQ(mape({}), 0);
}

// Small values weigh more: 10, 20 and 40 are best met by 20 (or less).
TEST(NullModel, IsTheBestOfAllConstants) {
  const std::vector<Pair> pairs = {
      {0, 10, 1, ""}, {0, 20, 1, ""}, {0, 40, 1, ""}};
  double best = 1e9;
  for (double c = 1; c < 60; c += 0.01) {
    double sum = 0;
    for (const Pair& pair : pairs) sum += std::abs(c / pair.published - 1);
    best = std::min(best, sum / 3);
  }
  EXPECT_NEAR(null_mape(pairs), best, 1e-3);
  EXPECT_LE(null_mape(pairs), best + 1e-12);
}

TEST(NullModel, HasNoErrorWithoutRows) { EXPECT_EQ(null_mape({}), 0); }

TEST(NullModel, KnowsTheWork) {
  // Times proportional to the work: nothing is left to explain.
  const std::vector<Pair> pairs = {
      {0, 10, 5, ""}, {0, 20, 10, ""}, {0, 42, 21, ""}};
  EXPECT_NEAR(null_mape(pairs), 0, 1e-12);
}

TEST(Spearman, ComparesOrdersOnly) {
  EXPECT_NEAR(spearman({1, 2, 3}, {10, 100, 1000}), 1, 1e-12);
  EXPECT_NEAR(spearman({1, 2, 3}, {3, 2, 1}), -1, 1e-12);
  // By hand: 1 - 6 * (1 + 1 + 0 + 1 + 1) / (5 * 24)
  EXPECT_NEAR(spearman({1, 2, 3, 4, 5}, {2, 1, 3, 5, 4}), 0.8, 1e-12);
  // Ties share their mean rank: 0.5, 0.5, 2 against 0, 1, 2
  EXPECT_NEAR(spearman({4, 4, 9}, {1, 2, 3}), std::sqrt(3) / 2, 1e-12);
  EXPECT_EQ(spearman({5, 5, 5}, {1, 2, 3}), 0);
  EXPECT_THROW(spearman({1}, {1, 2}), Error);
}

TEST(Contests, RegretIsTheLossOfThePickedPlan) {
  // Times. In "a" the second is picked (predicted 9), which took 12 for 10.
  std::vector<Pair> pairs = {{10, 10, 1, "a"},
                             {9, 12, 1, "a"},
                             {20, 30, 1, "a"},
                             {5, 5, 1, "alone"},
                             {1, 9, 1, ""}};
  Contests contests = judge_contests(pairs, /*lower_is_better=*/true);
  EXPECT_EQ(contests.count, 1);
  EXPECT_EQ(contests.rows, 3);
  EXPECT_NEAR(contests.regret, 0.2, 1e-12);
  EXPECT_NEAR(contests.spearman, 0.5, 1e-12);

  // Rates. The best plan of "b" is picked: regret is the mean, 0.1.
  for (Pair& pair : pairs) {
    pair.predicted = 1 / pair.predicted;
    pair.published = 1 / pair.published;
  }
  pairs.push_back({200, 180, 1, "b"});
  pairs.push_back({100, 120, 1, "b"});
  contests = judge_contests(pairs, /*lower_is_better=*/false);
  EXPECT_EQ(contests.count, 2);
  EXPECT_NEAR(contests.regret, 0.1, 1e-12);
  EXPECT_NEAR(contests.spearman, 0.75, 1e-12);
}

}  // namespace
}  // namespace shardbook::validate
