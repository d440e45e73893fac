#include "core/kernels/norm.h"

#include "core/check.h"
#include "tests/kernels/support.h"

namespace shardbook::kernels {
namespace {

constexpr double kEps = 1e-5;

// (x - mean) / sqrt(variance + eps), over the columns of x [rows, cols].
Values normalized(const Values& x) {
  const Values mean = xt::mean(x, {1}, xt::keep_dims);
  const Values variance = xt::mean(xt::square(x - mean), {1}, xt::keep_dims);
  return (x - mean) / xt::sqrt(variance + kEps);
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
    const Values xhat = normalized(x.as({rows, cols}));
    expect_close(y, xhat * gamma.as({cols}) + beta.as({cols}),
                 slack * tolerance(dtype));
    Array plain = array(rows * cols);
    layer_norm(context, dtype, rows, cols, kEps, x.data(), nullptr, nullptr,
               plain.data(), mean.data(), rstd.data());
    expect_close(plain, xhat, slack * tolerance(dtype));
  }
}

TEST_P(Norm, LayerNormBackwardIsTheSlope) {
  const std::int64_t rows = 140, cols = 21;
  const Array x = array(noise(rows * cols, 1)), gamma = array(noise(cols, 2)),
              dy = array(noise(rows * cols, 4));
  Array y = array(rows * cols), dx = array(rows * cols);
  Array mean(stat_dtype(dtype), rows), rstd(stat_dtype(dtype), rows);
  layer_norm(context, dtype, rows, cols, kEps, x.data(), gamma.data(), nullptr,
             y.data(), mean.data(), rstd.data());
  Array dgamma = array(cols), dbeta = array(cols);
  const Values in = x.as({rows, cols}), up = dy.as({rows, cols});
  const Values scaled_up = up * gamma.as({cols});
  layer_norm_backward(context, dtype, rows, cols, x.data(), gamma.data(),
                      mean.data(), rstd.data(), dy.data(), dx.data(),
                      dgamma.data(), dbeta.data());
  // One column at a time: an input moves its own row only.
  Values expected(in.shape());
  for (std::int64_t c = 0; c < cols; ++c) {
    const double h = 1e-5;
    Values above = in, below = in;
    xt::col(above, c) += h;
    xt::col(below, c) -= h;
    xt::col(expected, c) = xt::sum(
        scaled_up * (normalized(above) - normalized(below)) / (2 * h), {1});
  }
  expect_close(dx, expected, std::max(1e-8, 5 * tolerance(dtype)));
  expect_close(dgamma, xt::sum(up * normalized(in), {0}),
               10 * tolerance(dtype));
  expect_close(dbeta, xt::sum(up, {0}), 10 * tolerance(dtype));

  // In place, and with nothing asked for but dx.
  Array in_place = dy;
  layer_norm_backward(context, dtype, rows, cols, x.data(), gamma.data(),
                      mean.data(), rstd.data(), in_place.data(),
                      in_place.data(), nullptr, nullptr);
  EXPECT_TRUE(in_place == dx);
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
