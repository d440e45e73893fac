// Cross-entropy, squared error, embedding: values by hand, and the edges.

#include "tests/core/support.h"

namespace shardbook {
namespace {

Tensor targets_of(const std::vector<std::int64_t>& values) {
  return Tensor::from_values<std::int64_t>(
      values, {static_cast<std::int64_t>(values.size())});
}

double log_sum_exp(const std::vector<double>& row) {
  double sum_of = 0;
  for (double v : row) sum_of += std::exp(v);
  return std::log(sum_of);
}

TEST(CrossEntropy, IsTheMeanOverCountedTargets) {
  const Tensor logits = leaf_of({1, 2, 3, 0, 0, 0, 5, 1, 1}, {3, 3});
  const double a = log_sum_exp({1, 2, 3}) - 3;
  const double c = log_sum_exp({5, 1, 1}) - 1;
  const Tensor targets = targets_of({2, -100, 1});
  EXPECT_NEAR(cross_entropy(logits, targets).item(), (a + c) / 2, 1e-14);
  EXPECT_NEAR(cross_entropy(logits, targets, Reduction::kSum).item(), a + c,
              1e-14);
  cross_entropy(logits, targets).backward();
  const std::vector<double> grad = values(logits.grad());
  // (softmax - one-hot) / 2; nothing for the ignored row.
  EXPECT_NEAR(grad[2], (std::exp(3 - log_sum_exp({1, 2, 3})) - 1) / 2, 1e-14);
  EXPECT_EQ(grad[3], 0);
  EXPECT_EQ(grad[4], 0);
  EXPECT_EQ(grad[5], 0);
}

// Ranks with different numbers of counted targets sum numerators: the mean of
// their means would be wrong.
TEST(CrossEntropy, SumsOfPiecesMakeTheWholeAndMeansDoNot) {
  const Tensor logits = noise({6, 5}, 1, -3, 3);
  const Tensor targets = targets_of({1, -100, -100, 0, 4, 2});
  auto piece = [&](std::int64_t begin, std::int64_t end, Reduction reduction) {
    return cross_entropy(slice(logits, 0, begin, end),
                         slice(targets, 0, begin, end), reduction)
        .item();
  };
  const double whole = cross_entropy(logits, targets).item();
  EXPECT_NEAR((piece(0, 3, Reduction::kSum) + piece(3, 6, Reduction::kSum)) / 4,
              whole, 1e-14);
  EXPECT_GT(
      std::fabs(
          (piece(0, 3, Reduction::kMean) + piece(3, 6, Reduction::kMean)) / 2 -
          whole),
      1e-2);
}

TEST(CrossEntropy, WithoutAnyTargetIsNotANumber) {
  const Tensor logits = noise({2, 3});
  const Tensor none = targets_of({-100, -100});
  EXPECT_TRUE(std::isnan(cross_entropy(logits, none).item()));
  EXPECT_EQ(cross_entropy(logits, none, Reduction::kSum).item(), 0);
}

TEST(Softmax, MaskedScoresGetNothing) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16}) {
    const Tensor x = Tensor::from_values<double>(
        {1, -HUGE_VAL, 1, -HUGE_VAL, -HUGE_VAL, 0}, {2, 3});
    EXPECT_EQ(values(softmax(to_dtype(x, dtype))),
              (std::vector<double>{0.5, 0, 0.5, 0, 0, 1}));
  }
}

TEST(CrossEntropy, IsStableForLargeLogits) {
  const Tensor logits = leaf_of({1e4, -1e4, 0, -1e4, 1e4, 1e4}, {2, 3});
  EXPECT_NEAR(cross_entropy(logits, targets_of({1, 2})).item(),
              (2e4 + std::log(2)) / 2, 1e-10);
}

TEST(CrossEntropy, OfSixteenBitsIsF32) {
  const Tensor logits = leaf({4, 300}, 1, -3, 3, kOfBF16);
  const Tensor targets = targets_of({0, 299, 5, 7});
  const Tensor loss = cross_entropy(logits, targets);
  EXPECT_EQ(loss.dtype(), DType::kF32);
  EXPECT_NEAR(loss.item(),
              cross_entropy(to_dtype(logits, DType::kF64), targets).item(),
              1e-5);
  loss.backward();
  EXPECT_EQ(logits.grad().dtype(), DType::kBF16);
}

TEST(CrossEntropy, RefusesForeignTargets) {
  const Tensor logits = noise({2, 3});
  expect_error([&] { cross_entropy(logits, targets_of({0, 3})); }, {"3"});
  expect_error([&] { cross_entropy(logits, targets_of({-1, 0})); }, {"-1"});
  expect_error([&] { cross_entropy(logits, targets_of({0})); },
               {"[1]", "[2, 3]"});
  expect_error([&] { cross_entropy(logits, Tensor::zeros({2})); }, {"i64"});
}

TEST(CrossEntropy, RefusesTargetsOfAnotherDevice) {
  const Device other = Device::cpu(1);
  expect_error(
      [&] {
        cross_entropy(noise({2, 3}), to_device(targets_of({0, 1}), other));
      },
      {"cross_entropy", "cpu:1"});
}

// One rank has all classes, followed by padding columns.
TEST(CrossEntropyPart, PaddingCountsForNothing) {
  for (const auto& [dtype, near] : {std::pair(DType::kF64, 1e-14),
                                    {DType::kF32, 1e-6},
                                    {DType::kBF16, 1e-2}}) {
    const Tensor logits = leaf({4, 45}, 1, -3, 3, {dtype, Device()});
    const Tensor targets = targets_of({2, -100, 0, 1});
    const auto alone = [](const Tensor&, bool) {};
    const Tensor loss = cross_entropy_part(logits, targets, 0, 43, alone);
    loss.backward();
    const Tensor classes = slice(logits.detach(), 1, 0, 43).set_requires_grad();
    const Tensor expected = cross_entropy(classes, targets);
    expected.backward();
    EXPECT_NEAR(loss.item(), expected.item(), near);
    expect_close(slice(logits.grad(), 1, 0, 43), classes.grad(), near);
    EXPECT_EQ(values(slice(logits.grad(), 1, 43, 45)),
              std::vector<double>(8, 0.0));
  }
}

// A rank with padding columns only gets the same loss as the others.
TEST(CrossEntropyPart, ARankOfPaddingAlone) {
  const Tensor targets = targets_of({2, 0});
  std::vector<Tensor> sums;
  const Tensor loss = cross_entropy_part(
      noise({2, 3}, 1, -3, 3), targets, 0, 3,
      [&](const Tensor& x, bool) { sums.push_back(x.clone()); });
  const Tensor padding = leaf({2, 4}, 2);
  std::size_t next = 0;
  const Tensor same = cross_entropy_part(
      padding, targets, 3, 3, [&](const Tensor& x, bool is_max) {
        for (const double own : values(x)) {
          EXPECT_EQ(own, is_max ? -HUGE_VAL : 0);
        }
        x.copy_from(sums[next++]);
      });
  EXPECT_EQ(same.item(), loss.item());
  same.backward();
  EXPECT_EQ(values(padding.grad()), std::vector<double>(8, 0.0));
}

TEST(Embedding, RepeatedIndicesAddUp) {
  const Tensor table = leaf_of({1, 2, 3, 4, 5, 6}, {3, 2});
  const Tensor y = embedding(table, targets_of({2, 0, 2, 2}));
  EXPECT_EQ(values(y), (std::vector<double>{5, 6, 1, 2, 5, 6, 5, 6}));
  sum(mul(y, Tensor::from_values<double>({1, 2, 3, 4, 5, 6, 7, 8}, {4, 2})))
      .backward();
  EXPECT_EQ(values(table.grad()),
            (std::vector<double>{3, 4, 0, 0, 1 + 5 + 7, 2 + 6 + 8}));
}

TEST(Embedding, TakesBothKindsOfIndices) {
  const Tensor table = noise({3, 2});
  const Tensor wide = Tensor::from_values<std::int64_t>({1, 2}, {2, 1});
  const Tensor narrow = Tensor::from_values<std::int32_t>({1, 2}, {2, 1});
  EXPECT_EQ(embedding(table, wide).shape(), (Shape{2, 1, 2}));
  EXPECT_TRUE(bitwise_equal(embedding(table, wide), embedding(table, narrow)));
  expect_error([&] { embedding(table, Tensor::zeros({1})); }, {"f32", "i64"});
  expect_error([&] { embedding(table, targets_of({3})); }, {"3"});
  expect_error([&] { embedding(table, targets_of({-1})); }, {"-1"});
  expect_error([&] { embedding(noise({4}), targets_of({0})); }, {"[4]"});
}

TEST(MseLoss, IsTheMeanOfSquares) {
  const Tensor x = leaf_of({1, 2, 3, 4}, {2, 2});
  const Tensor target = Tensor::from_values<double>({1, 0, 3, 0}, {2, 2});
  const Tensor loss = mse_loss(x, target);
  EXPECT_EQ(loss.item(), 5);
  loss.backward();
  EXPECT_EQ(values(x.grad()), (std::vector<double>{0, 1, 0, 2}));
  expect_error([&] { mse_loss(x, noise({4})); }, {"[2, 2]", "[4]"});
}

}  // namespace
}  // namespace shardbook
