#include "core/kernels/softmax.h"

#include <limits>

#include "core/check.h"
#include "tests/kernels/support.h"

namespace shardbook::kernels {
namespace {

double log_sum_exp(const std::vector<double>& x, std::int64_t from,
                   std::int64_t n) {
  double max = -kInf, sum = 0.0;
  for (std::int64_t i = 0; i < n; ++i) max = std::max(max, x[from + i]);
  for (std::int64_t i = 0; i < n; ++i) sum += std::exp(x[from + i] - max);
  return max + std::log(sum);
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
    const auto in = x.values();
    std::vector<double> expected(rows * cols), expected_log(rows * cols);
    for (std::int64_t i = 0; i < rows * cols; ++i) {
      expected_log[i] = in[i] - log_sum_exp(in, i / cols * cols, cols);
      expected[i] = std::exp(expected_log[i]);
    }
    const double slack = dtype == DType::kF64 ? 100.0 : 2.0;
    expect_close(y.values(), expected, slack * tolerance(dtype));
    expect_close(log_y.values(), expected_log, slack * tolerance(dtype));
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
    auto p = y.values(), g = dy.values();
    std::vector<double> expected(rows * cols);
    for (std::int64_t r = 0; r < rows; ++r) {
      double dot = 0.0;
      for (std::int64_t c = 0; c < cols; ++c) {
        dot += p[r * cols + c] * g[r * cols + c];
      }
      for (std::int64_t c = r * cols; c < (r + 1) * cols; ++c) {
        expected[c] = p[c] * (g[c] - dot);
      }
    }
    expect_close(dx.values(), expected, 2 * tolerance(dtype));

    log_softmax(context, dtype, rows, cols, x.data(), y.data());
    log_softmax_backward(context, dtype, rows, cols, y.data(), dy.data(),
                         dx.data());
    p = y.values();
    for (std::int64_t r = 0; r < rows; ++r) {
      double sum = 0.0;
      for (std::int64_t c = 0; c < cols; ++c) sum += g[r * cols + c];
      for (std::int64_t c = r * cols; c < (r + 1) * cols; ++c) {
        expected[c] = g[c] - std::exp(p[c]) * sum;
      }
    }
    expect_close(dx.values(), expected, 4 * tolerance(dtype));
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
    const auto in = logits.values();
    std::vector<double> expected_loss(rows), expected_total(rows);
    std::vector<double> expected(rows * cols, 0.0);
    const double scale = 0.125;
    for (std::int64_t r = 0; r < rows; ++r) {
      expected_total[r] = log_sum_exp(in, r * cols, cols);
      if (targets[r] == kIgnoreIndex) continue;
      expected_loss[r] = expected_total[r] - in[r * cols + targets[r]];
      for (std::int64_t c = 0; c < cols; ++c) {
        expected[r * cols + c] =
            scale * (std::exp(in[r * cols + c] - expected_total[r]) -
                     (c == targets[r] ? 1.0 : 0.0));
      }
    }
    const double stat_tolerance = tolerance(stat_dtype(dtype));
    expect_close(loss.values(), expected_loss, 4 * stat_tolerance);
    expect_close(total.values(), expected_total, 4 * stat_tolerance);
    const Array dloss(stat_dtype(dtype), std::vector<double>{scale});
    Array grad = logits;
    cross_entropy_backward(context, dtype, rows, cols, logits.data(),
                           targets.data(), total.data(), dloss.data(), false,
                           grad.data());
    expect_close(grad.values(), expected, tolerance(dtype));
    Array in_place = logits;
    cross_entropy_backward(context, dtype, rows, cols, in_place.data(),
                           targets.data(), total.data(), dloss.data(), false,
                           in_place.data());
    EXPECT_TRUE(in_place == grad);
  }
}

SB_OVER_FLOATING_DTYPES(Softmax);

TEST(CrossEntropyErrors, TargetsOutsideTheClasses) {
  KernelContext context;
  double logits[4] = {}, loss[2];
  for (const std::int64_t bad : {2, -1, -101}) {
    const std::int64_t targets[2] = {0, bad};
    EXPECT_THROW(cross_entropy(context, DType::kF64, 2, 2, logits, targets,
                               loss, nullptr),
                 Error);
  }
}

}  // namespace
}  // namespace shardbook::kernels
