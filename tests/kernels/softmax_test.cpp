#include "core/kernels/softmax.h"

#include "tests/kernels/support.h"

namespace shardbook::kernels {
namespace {

// Over columns; [rows, 1].
Values log_sum_exp(const Values& x) {
  const Values max = xt::amax(x, {1}, xt::keep_dims);
  return max + xt::log(xt::sum(xt::exp(x - max), {1}, xt::keep_dims));
}

class Softmax : public KernelTest {
 protected:
  const std::int64_t shapes_[5][2] = {
      {1, 1}, {3, 7}, {20, 65}, {5, 256}, {2, 1000}};
};

TEST_P(Softmax, EqualsTheDefinition) {
  for (const auto& [rows, cols] : shapes_) {
    std::vector<double> values = noise(rows * cols, 1);
    for (double& v : values) v = 20 * v + 1000.0 * (dtype == DType::kF64);
    const Array x = array(values);
    Array y = array(rows * cols), log_y = array(rows * cols);
    softmax(context, dtype, rows, cols, x.data(), y.data());
    log_softmax(context, dtype, rows, cols, x.data(), log_y.data());
    const Values in = x.as({rows, cols}), expected = in - log_sum_exp(in);
    const double slack = dtype == DType::kF64 ? 100.0 : 2.0;
    expect_close(y, xt::exp(expected), slack * tolerance(dtype));
    expect_close(log_y, expected, slack * tolerance(dtype));
    Array in_place = x;
    softmax(context, dtype, rows, cols, in_place.data(), in_place.data());
    EXPECT_TRUE(in_place == y);
    in_place = x;
    log_softmax(context, dtype, rows, cols, in_place.data(), in_place.data());
    EXPECT_TRUE(in_place == log_y);
  }
}

TEST_P(Softmax, BackwardIsTheSlope) {
  for (const auto& [rows, cols] : shapes_) {
    const Array x = array(noise(rows * cols, 1)),
                dy = array(noise(rows * cols, 2));
    Array y = array(rows * cols), dx = array(rows * cols);
    softmax(context, dtype, rows, cols, x.data(), y.data());
    softmax_backward(context, dtype, rows, cols, y.data(), dy.data(),
                     dx.data());
    const Values p = y.as({rows, cols}), g = dy.as({rows, cols});
    const Values dot = xt::sum(p * g, {1}, xt::keep_dims);
    expect_close(dx, p * (g - dot), 2 * tolerance(dtype));

    log_softmax(context, dtype, rows, cols, x.data(), y.data());
    log_softmax_backward(context, dtype, rows, cols, y.data(), dy.data(),
                         dx.data());
    const Values sum = xt::sum(g, {1}, xt::keep_dims);
    expect_close(dx, g - xt::exp(y.as({rows, cols})) * sum,
                 4 * tolerance(dtype));
  }
}

TEST_P(Softmax, MaskedScoresGetNothing) {
  const Array x = array({1.0, -kInf, 1.0, -kInf, -kInf, 0.0});
  Array y = array(6);
  softmax(context, dtype, 2, 3, x.data(), y.data());
  EXPECT_EQ(y.values(), (std::vector<double>{0.5, 0, 0.5, 0, 0, 1}));
}

TEST_P(Softmax, CrossEntropyAndItsGradient) {
  for (const auto& [rows, cols] : shapes_) {
    const Array logits = array(noise(rows * cols, 3));
    std::vector<std::int64_t> targets(rows);
    for (std::int64_t r = 0; r < rows; ++r) targets[r] = (7 * r + 2) % cols;
    if (rows > 2) targets[1] = kIgnoreIndex;
    Array loss(stat_dtype(dtype), rows), total(stat_dtype(dtype), rows);
    cross_entropy(context, dtype, rows, cols, logits.data(), targets.data(),
                  loss.data(), total.data());
    const Values in = logits.as({rows, cols}), sums = log_sum_exp(in);
    Values losses = xt::zeros<double>({rows});
    const double scale = 0.125;
    Values expected = scale * xt::exp(in - sums);
    for (std::int64_t r = 0; r < rows; ++r) {
      if (targets[r] == kIgnoreIndex) {
        xt::row(expected, r) = 0;
        continue;
      }
      losses(r) = sums(r, 0) - in(r, targets[r]);
      expected(r, targets[r]) -= scale;
    }
    const double stat_tolerance = tolerance(stat_dtype(dtype));
    expect_close(loss, losses, 4 * stat_tolerance);
    expect_close(total, sums, 4 * stat_tolerance);
    const Array dloss(stat_dtype(dtype), std::vector<double>{scale});
    Array grad = logits;
    cross_entropy_backward(context, dtype, rows, cols, logits.data(),
                           targets.data(), total.data(), dloss.data(), false,
                           grad.data());
    expect_close(grad, expected, tolerance(dtype));
    Array in_place = logits;
    cross_entropy_backward(context, dtype, rows, cols, in_place.data(),
                           targets.data(), total.data(), dloss.data(), false,
                           in_place.data());
    EXPECT_TRUE(in_place == grad);
  }
}

SB_OVER_FLOATING_DTYPES(Softmax);

}  // namespace
}  // namespace shardbook::kernels
