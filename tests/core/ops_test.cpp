// Values of the simpler operations, and the arguments that they refuse.

#include "tests/core/support.h"

namespace shardbook {
namespace {

using Values = std::vector<double>;

Tensor of(const Values& v, const Shape& shape) {
  return Tensor::from_values<double>(v, shape);
}

TEST(Elementwise, HaveTheirValues) {
  const Tensor x = of({-2, 0, 0.5, 3}, {4});
  EXPECT_EQ(values(neg(x)), (Values{2, 0, -0.5, -3}));
  EXPECT_EQ(values(abs(x)), (Values{2, 0, 0.5, 3}));
  EXPECT_EQ(values(relu(x)), (Values{0, 0, 0.5, 3}));
  EXPECT_EQ(values(square(x)), (Values{4, 0, 0.25, 9}));
  EXPECT_EQ(values(scale(x, -2)), (Values{4, 0, -1, -6}));
  EXPECT_EQ(values(add_scalar(x, 1)), (Values{-1, 1, 1.5, 4}));
  const Tensor one = of({1}, {1});
  EXPECT_NEAR(tanh(one).item(), 0.76159415595576489, 1e-15);
  EXPECT_NEAR(exp(one).item(), 2.7182818284590451, 1e-15);
  EXPECT_NEAR(sigmoid(one).item(), 0.73105857863000488, 1e-15);
  EXPECT_NEAR(gelu(one).item(), 0.84119199060827676, 1e-14);
  EXPECT_NEAR(gelu(one, GeluForm::kErf).item(), 0.84134474606854293, 1e-15);
  EXPECT_NEAR(log(of({2}, {1})).item(), 0.69314718055994529, 1e-15);
  EXPECT_EQ(values(sqrt(of({0.25, 9}, {2}))), (Values{0.5, 3}));
}

TEST(Elementwise, NotANumberStaysOne) {
  const Tensor x = of({std::nan(""), 1}, {2});
  for (const Tensor& y : {relu(x), abs(x), gelu(x), add(x, x)}) {
    EXPECT_TRUE(std::isnan(values(y)[0]));
    EXPECT_FALSE(std::isnan(values(y)[1]));
  }
}

TEST(Elementwise, BroadcastAsNumPyDoes) {
  const Tensor row = of({1, 2, 3}, {3}), column = of({10, 20}, {2, 1});
  EXPECT_EQ(values(add(row, column)), (Values{11, 12, 13, 21, 22, 23}));
  EXPECT_EQ(sub(column, row).shape(), (Shape{2, 3}));
  EXPECT_EQ(values(sub(column, row)), (Values{9, 8, 7, 19, 18, 17}));
  EXPECT_EQ(values(div(row, of({2}, {}))), (Values{0.5, 1, 1.5}));
  EXPECT_EQ(add(of({}, {0, 3}), row).shape(), (Shape{0, 3}));
  expect_error([&] { add(row, of({1, 2}, {2})); }, {"[3]", "[2]"});
  expect_error([&] { mul(row, to_dtype(row, DType::kF32)); },
               {"mul", "f64", "f32"});
}

TEST(Conversions, RoundAndCarryGradientsBack) {
  const Tensor x = leaf_of({1, 1 + 1.0 / 512}, {2});
  const Tensor y = to_dtype(x, DType::kBF16);
  EXPECT_EQ(values(y), (Values{1, 1}));
  sum(y).backward();
  EXPECT_EQ(x.grad().dtype(), DType::kF64);
  EXPECT_TRUE(to_dtype(x, DType::kF64).is_same(x));
  EXPECT_TRUE(to_device(x, x.device()).is_same(x));
  EXPECT_FALSE(to_dtype(x, DType::kI64).requires_grad());
}

TEST(Reductions, AlongEachDim) {
  const Tensor x = of({1, 2, 3, 4, 5, 6}, {2, 3});
  EXPECT_EQ(sum(x).item(), 21);
  EXPECT_EQ(mean(x).item(), 3.5);
  EXPECT_EQ(sum(x).shape(), Shape{});
  EXPECT_EQ(values(sum(x, 0)), (Values{5, 7, 9}));
  EXPECT_EQ(values(sum(x, -1)), (Values{6, 15}));
  EXPECT_EQ(values(mean(x, 1)), (Values{2, 5}));
  EXPECT_EQ(sum(of({}, {0})).item(), 0);
  expect_error([] { mean(of({}, {0})); }, {"no elements"});
  expect_error([&] { sum(x, 2); }, {"dim 2"});
  EXPECT_EQ(sum_of_squares(x), 91);
}

TEST(Layout, MovesElements) {
  const Tensor x = of({0, 1, 2, 3, 4, 5}, {2, 3});
  EXPECT_EQ(values(transpose(x, 0, 1)), (Values{0, 3, 1, 4, 2, 5}));
  EXPECT_EQ(values(slice(x, 1, 1, 3)), (Values{1, 2, 4, 5}));
  EXPECT_EQ(values(concat({x, slice(x, 1, 0, 1)}, 1)),
            (Values{0, 1, 2, 0, 3, 4, 5, 3}));
  EXPECT_EQ(permute(noise({2, 3, 4}), {2, 0, 1}).shape(), (Shape{4, 2, 3}));
  EXPECT_EQ(reshape(x, {-1}).shape(), Shape{6});
  EXPECT_EQ(reshape(x, {3, -1}).shape(), (Shape{3, 2}));
}

TEST(Layout, RefusesWhatDoesNotFit) {
  const Tensor x = noise({2, 3});
  expect_error([&] { reshape(x, {4, -1}); }, {"[2, 3]", "[4, -1]"});
  expect_error([&] { reshape(x, {5}); }, {"[2, 3]", "[5]"});
  expect_error([&] { reshape(x, {-1, -1}); }, {"-1"});
  expect_error([&] { slice(x, 0, 1, 3); }, {"1 to 3", "[2, 3]"});
  expect_error([&] { slice(x, 2, 0, 1); }, {"dim 2"});
  expect_error([&] { concat({x, noise({2, 4})}, 0); }, {"[2, 3]", "[2, 4]"});
  expect_error([&] { concat({x, noise({2})}, 0); }, {"[2]"});
  expect_error([&] { concat({}, 0); }, {"no tensors"});
  expect_error([&] { permute(x, {0}); }, {"1 dims", "[2, 3]"});
  expect_error([&] { permute(x, {0, 0}); }, {"twice"});
  expect_error([&] { transpose(x, 0, 5); }, {"dim 5"});
}

TEST(Products, HaveTheirValues) {
  const Tensor a = of({1, 2, 3, 4}, {2, 2}), b = of({5, 6, 7, 8}, {2, 2});
  EXPECT_EQ(values(matmul(a, b)), (Values{19, 22, 43, 50}));
  EXPECT_EQ(values(matmul(a, b, true, false)), (Values{26, 30, 38, 44}));
  EXPECT_EQ(values(matmul(a, b, false, true)), (Values{17, 23, 39, 53}));
  EXPECT_EQ(values(linear(a, b, of({100, 200}, {2}))),
            (Values{119, 222, 143, 250}));
}

TEST(Products, OfNothingAreZeros) {
  EXPECT_EQ(values(matmul(of({}, {2, 0}), of({}, {0, 3}))), Values(6, 0));
  EXPECT_EQ(matmul(of({}, {0, 4}), noise({4, 3})).shape(), (Shape{0, 3}));
  EXPECT_EQ(linear(of({}, {0, 4}), noise({4, 3})).shape(), (Shape{0, 3}));
  EXPECT_EQ(values(linear(of({}, {2, 0}), of({}, {0, 3}))), Values(6, 0));
  EXPECT_EQ(values(linear(of({}, {2, 0}), of({}, {0, 3}), of({1, 2, 3}, {3}))),
            (Values{1, 2, 3, 1, 2, 3}));
}

TEST(Products, RowsOfNothingPassGradientsToTheBias) {
  const Tensor x = leaf({2, 0}), w = leaf({0, 3}), b = leaf({3});
  sum(linear(x, w, b)).backward();
  EXPECT_EQ(x.grad().shape(), (Shape{2, 0}));
  EXPECT_EQ(w.grad().shape(), (Shape{0, 3}));
  EXPECT_EQ(values(b.grad()), Values(3, 2));
}

TEST(Products, AnEmptyBatchHasZeroGradients) {
  const Tensor w = leaf({4, 3}), b = leaf({3});
  sum(linear(of({}, {0, 4}), w, b)).backward();
  EXPECT_EQ(values(w.grad()), Values(12, 0));
  EXPECT_EQ(values(b.grad()), Values(3, 0));
}

TEST(Products, RefuseWhatDoesNotFit) {
  const Tensor x = noise({2, 3}), w = noise({3, 5}), other = noise({4, 5});
  const Tensor pages = noise({2, 3, 4}), two = noise({2, 2, 3}),
               three = noise({3, 3, 4});
  const Tensor three_long = noise({3}), b = to_dtype(noise({5}), DType::kF32);
  expect_error([&] { matmul(x, x); }, {"[2, 3]", "do not fit"});
  expect_error([&] { matmul(x, pages); }, {"[2, 3, 4]"});
  expect_error([&] { matmul(two, three); }, {"[2, 2, 3]", "[3, 3, 4]"});
  expect_error([&] { matmul(three_long, noise({3, 1})); }, {"[3]"});
  expect_error([&] { linear(x, other); }, {"[2, 3]", "[4, 5]"});
  expect_error([&] { linear(x, w, three_long); }, {"bias [3]", "[3, 5]"});
  expect_error([&] { linear(x, w, b); }, {"linear", "f32", "f64"});
}

TEST(Operations, OnIntegersAreRefusedWhereTheyMakeNoSense) {
  const Tensor i = Tensor::arange(4, {DType::kI64, Device()});
  EXPECT_EQ(values(add(i, i)), (Values{0, 2, 4, 6}));
  EXPECT_FALSE(error_of([&] { gelu(i); }).empty());
  EXPECT_FALSE(error_of([&] { softmax(i); }).empty());
  const Tensor m = reshape(i, {2, 2});
  EXPECT_FALSE(error_of([&] { matmul(m, m); }).empty());
}

}  // namespace
}  // namespace shardbook
