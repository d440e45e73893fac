#include "core/kernels/norm.h"

#include "core/check.h"
#include "tests/kernels/support.h"

namespace shardbook::kernels {
namespace {

constexpr double kEps = 1e-5;

std::vector<double> layer_norm_reference(std::int64_t rows, std::int64_t cols,
                                         const std::vector<double>& x,
                                         const std::vector<double>& gamma,
                                         const std::vector<double>& beta) {
  std::vector<double> y(rows * cols);
  for (std::int64_t r = 0; r < rows; ++r) {
    double mean = 0.0, variance = 0.0;
    for (std::int64_t c = 0; c < cols; ++c) mean += x[r * cols + c] / cols;
    for (std::int64_t c = 0; c < cols; ++c) {
      variance += (x[r * cols + c] - mean) * (x[r * cols + c] - mean) / cols;
    }
    for (std::int64_t c = 0; c < cols; ++c) {
      y[r * cols + c] =
          (x[r * cols + c] - mean) / std::sqrt(variance + kEps) * gamma[c] +
          beta[c];
    }
  }
  return y;
}

class Norm : public KernelTest {};

TEST_P(Norm, LayerNormEqualsTheDefinition) {
  const std::int64_t shapes[][2] = {{1, 1}, {3, 5}, {7, 64}, {150, 37}, {0, 4}};
  for (const auto& [rows, cols] : shapes) {
    std::vector<double> offset = noise(rows * cols, 1);
    for (double& v : offset) v += 3.0;
    const Array x = array(offset), gamma = array(noise(cols, 2)),
                beta = array(noise(cols, 3));
    Array y = array(rows * cols);
    Array mean(stat_dtype(dtype), rows), rstd(stat_dtype(dtype), rows);
    layer_norm(context, dtype, rows, cols, kEps, x.data(), gamma.data(),
               beta.data(), y.data(), mean.data(), rstd.data());
    // Rows of one element are all rounding error of the mean.
    const double slack = cols == 1 ? 2.0 : 4.0;
    expect_close(y.values(),
                 layer_norm_reference(rows, cols, x.values(), gamma.values(),
                                      beta.values()),
                 slack * tolerance(dtype));
    Array plain = array(rows * cols);
    layer_norm(context, dtype, rows, cols, kEps, x.data(), nullptr, nullptr,
               plain.data(), mean.data(), rstd.data());
    expect_close(plain.values(),
                 layer_norm_reference(rows, cols, x.values(),
                                      std::vector<double>(cols, 1.0),
                                      std::vector<double>(cols, 0.0)),
                 slack * tolerance(dtype));
  }
}

TEST_P(Norm, LayerNormBackwardIsTheSlope) {
  const std::int64_t rows = 140, cols = 21;
  const Array x = array(noise(rows * cols, 1)), gamma = array(noise(cols, 2)),
              dy = array(noise(rows * cols, 4));
  const std::vector<double> zeros(cols, 0.0);
  Array y = array(rows * cols), dx = array(rows * cols);
  Array mean(stat_dtype(dtype), rows), rstd(stat_dtype(dtype), rows);
  layer_norm(context, dtype, rows, cols, kEps, x.data(), gamma.data(), nullptr,
             y.data(), mean.data(), rstd.data());
  Array dgamma = array(noise(cols, 5)), dbeta = array(noise(cols, 6));
  auto expected_gamma = dgamma.values(), expected_beta = dbeta.values();
  layer_norm_backward(context, dtype, rows, cols, x.data(), gamma.data(),
                      mean.data(), rstd.data(), dy.data(), dx.data(),
                      dgamma.data(), dbeta.data(), true);
  // One input at a time moves one row only.
  const auto in = x.values(), g = gamma.values(), up = dy.values();
  const auto xhat = layer_norm_reference(rows, cols, in,
                                         std::vector<double>(cols, 1.0), zeros);
  std::vector<double> expected(rows * cols);
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < cols; ++c) {
      expected_gamma[c] += up[r * cols + c] * xhat[r * cols + c];
      expected_beta[c] += up[r * cols + c];
      const double h = 1e-5;
      std::vector<double> row(in.begin() + r * cols,
                              in.begin() + (r + 1) * cols);
      row[c] += h;
      const auto above = layer_norm_reference(1, cols, row, g, zeros);
      row[c] -= 2 * h;
      const auto below = layer_norm_reference(1, cols, row, g, zeros);
      double sum = 0.0;
      for (std::int64_t j = 0; j < cols; ++j) {
        sum += up[r * cols + j] * (above[j] - below[j]) / (2 * h);
      }
      expected[r * cols + c] = sum;
    }
  }
  expect_close(dx.values(), expected, std::max(1e-8, 5 * tolerance(dtype)));
  expect_close(dgamma.values(), expected_gamma, 10 * tolerance(dtype));
  expect_close(dbeta.values(), expected_beta, 10 * tolerance(dtype));

  // Without accumulation, in place, and with nothing asked for but dx.
  Array in_place = dy;
  layer_norm_backward(context, dtype, rows, cols, x.data(), gamma.data(),
                      mean.data(), rstd.data(), in_place.data(),
                      in_place.data(), nullptr, nullptr);
  EXPECT_TRUE(in_place == dx);
}

TEST_P(Norm, LayerNormBackwardDoesNotDependOnThreads) {
  const std::int64_t rows = 1000, cols = 48;
  const Array x = array(noise(rows * cols, 1)), dy = array(noise(rows * cols));
  Array y = array(rows * cols), mean(stat_dtype(dtype), rows),
        rstd(stat_dtype(dtype), rows);
  layer_norm(context, dtype, rows, cols, kEps, x.data(), nullptr, nullptr,
             y.data(), mean.data(), rstd.data());
  std::vector<Array> results;
  for (const int threads : {1, 4}) {
    with_threads(threads, [&] {
      Array dgamma = array(cols), dbeta = array(cols);
      layer_norm_backward(context, dtype, rows, cols, x.data(), nullptr,
                          mean.data(), rstd.data(), dy.data(), nullptr,
                          dgamma.data(), dbeta.data());
      results.push_back(dgamma);
      results.push_back(dbeta);
    });
  }
  EXPECT_TRUE(results[0] == results[2]);
  EXPECT_TRUE(results[1] == results[3]);
}

// All pieces of batch normalisation, against finite differences of the whole.
TEST_P(Norm, ChannelPiecesMakeABatchNorm) {
  for (const std::int64_t inner : {1, 6, 50}) {
    const ChannelShape shape{4, 3, inner};
    const std::int64_t n = 4 * 3 * inner;
    const double count = 4.0 * inner;
    const Array x = array(noise(n, 1)), gamma = array(noise(3, 2)),
                beta = array(noise(3, 3)), dy = array(noise(n, 4));
    const auto in = x.values(), up = dy.values();
    const auto channel = [&](std::int64_t i) { return i / inner % 3; };

    std::vector<double> mean(3), squares(3), rstd(3);
    channel_sums(context, dtype, shape, x.data(), mean.data());
    for (double& v : mean) v /= count;
    channel_centered_squares(context, dtype, shape, x.data(), mean.data(),
                             squares.data());
    for (int c = 0; c < 3; ++c)
      rstd[c] = 1 / std::sqrt(squares[c] / count + kEps);

    const auto normalize = [&](const std::vector<double>& values) {
      std::vector<double> m(3), s(3), y(n);
      for (std::int64_t i = 0; i < n; ++i) m[channel(i)] += values[i] / count;
      for (std::int64_t i = 0; i < n; ++i) {
        const double d = values[i] - m[channel(i)];
        s[channel(i)] += d * d / count;
      }
      for (std::int64_t i = 0; i < n; ++i) {
        const std::int64_t c = channel(i);
        y[i] = (values[i] - m[c]) / std::sqrt(s[c] + kEps) * gamma.values()[c] +
               beta.values()[c];
      }
      return y;
    };
    Array y = array(n);
    channel_normalize(context, dtype, shape, x.data(), mean.data(), rstd.data(),
                      gamma.data(), beta.data(), y.data());
    expect_close(y.values(), normalize(in), 3 * tolerance(dtype));

    std::vector<double> sum_dy(3), sum_dy_xhat(3);
    channel_backward_sums(context, dtype, shape, x.data(), dy.data(),
                          mean.data(), rstd.data(), sum_dy.data(),
                          sum_dy_xhat.data());
    std::vector<double> expected_dy(3), expected_xhat(3), expected(n);
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t c = channel(i);
      expected_dy[c] += up[i];
      expected_xhat[c] += up[i] * (in[i] - mean[c]) * rstd[c];
    }
    expect_close(sum_dy, expected_dy, 1e-10);
    expect_close(sum_dy_xhat, expected_xhat, 1e-10);

    Array dx = array(n);
    channel_backward(context, dtype, shape, x.data(), dy.data(), mean.data(),
                     rstd.data(), gamma.data(), sum_dy.data(),
                     sum_dy_xhat.data(), count, dx.data());
    for (std::int64_t i = 0; i < n; ++i) {
      const double h = 1e-5;
      auto moved = in;
      moved[i] += h;
      const auto above = normalize(moved);
      moved[i] -= 2 * h;
      const auto below = normalize(moved);
      for (std::int64_t j = 0; j < n; ++j) {
        expected[i] += up[j] * (above[j] - below[j]) / (2 * h);
      }
    }
    expect_close(dx.values(), expected, std::max(1e-8, 5 * tolerance(dtype)));
  }
}

SB_OVER_FLOATING_DTYPES(Norm);

TEST(NormErrors, RowsOfNothing) {
  KernelContext context;
  double x = 0;
  EXPECT_THROW(layer_norm(context, DType::kF64, 1, 0, kEps, &x, nullptr,
                          nullptr, &x, &x, &x),
               Error);
}

}  // namespace
}  // namespace shardbook::kernels
