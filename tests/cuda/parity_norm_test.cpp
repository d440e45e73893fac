#include "core/check.h"
#include "core/kernels/norm.h"
#include "tests/cuda/parity.h"

namespace shardbook::parity {
namespace {

using kernels::ChannelShape;
using kernels::noise;
using kernels::stat_dtype;
using kernels::tolerance;

constexpr double kEps = 1e-5;

struct NormRows {
  std::int64_t rows, cols;
};
/// None, one, odd; a warp, 128 and 256 threads for a row; rows in registers,
/// and longer ones; whole vectors and single elements.
const NormRows kNormRows[] = {
    {0, 4},    {1, 1},    {3, 5},    {70, 37},  {20, 64},  {9, 768}, {3, 1000},
    {5, 1001}, {3, 2048}, {2, 2047}, {2, 4096}, {2, 8200}, {2, 8193}};

std::vector<double> shifted(double center, std::vector<double> values) {
  for (double& v : values) v += center;
  return values;
}

class NormParity : public ParityTest {};

TEST_P(NormParity, LayerNormEqualsTheCpu) {
  for (const auto& [rows, cols] : kNormRows) {
    for (const bool affine : {true, false}) {
      SCOPED_TRACE(testing::Message() << rows << " x " << cols);
      Comparison c;
      const Slot x = c.array(dtype, shifted(3.0, noise(rows * cols, 1)));
      const Slot gamma = affine ? c.array(dtype, noise(cols, 2)) : c.null();
      const Slot beta = affine ? c.array(dtype, noise(cols, 3)) : c.null();
      const Slot y = c.empty(dtype, rows * cols);
      const Slot mean = c.empty(stat_dtype(dtype), rows);
      const Slot rstd = c.empty(stat_dtype(dtype), rows);
      c.expect_equal(kernels::layer_norm, 4 * tolerance(dtype), dtype, rows,
                     cols, kEps, x, gamma, beta, y, mean, rstd);
    }
  }
}

TEST_P(NormParity, LayerNormInPlaceEqualsTheCpu) {
  for (const auto& [rows, cols] : {NormRows{5, 40}, {2, 1001}, {2, 8200}}) {
    Comparison c;
    const Slot x = c.array(dtype, noise(rows * cols, 1));
    const Slot mean = c.empty(stat_dtype(dtype), rows);
    const Slot rstd = c.empty(stat_dtype(dtype), rows);
    c.expect_equal(kernels::layer_norm, 4 * tolerance(dtype), dtype, rows, cols,
                   kEps, x, c.null(), c.null(), x, mean, rstd);
  }
}

/// Which gradients layer_norm_backward is asked for.
struct WantedGradients {
  bool dx, dgamma, dbeta, accumulate, in_place;
};

TEST_P(NormParity, LayerNormBackwardEqualsTheCpu) {
  const WantedGradients cases[] = {{true, true, true, true, false},
                                   {true, true, true, false, true},
                                   {true, false, false, false, true},
                                   {false, true, false, false, false}};
  for (const auto& [rows, cols] : kNormRows) {
    for (const WantedGradients& wanted : cases) {
      SCOPED_TRACE(testing::Message()
                   << rows << " x " << cols << " dx " << wanted.dx << " dgamma "
                   << wanted.dgamma << " dbeta " << wanted.dbeta);
      Comparison c;
      const Slot x = c.array(dtype, noise(rows * cols, 1));
      const Slot gamma =
          wanted.accumulate ? c.array(dtype, noise(cols, 2)) : c.null();
      const Slot dy = c.array(dtype, noise(rows * cols, 3));
      const Slot mean = c.array(stat_dtype(dtype), noise(rows, 4));
      const Slot rstd =
          c.array(stat_dtype(dtype), shifted(2.0, noise(rows, 5)));
      const Slot dx = !wanted.dx        ? c.null()
                      : wanted.in_place ? dy
                                        : c.empty(dtype, rows * cols);
      const Slot dgamma =
          wanted.dgamma ? c.array(dtype, noise(cols, 6)) : c.null();
      const Slot dbeta =
          wanted.dbeta ? c.array(dtype, noise(cols, 7)) : c.null();
      c.expect_equal(kernels::layer_norm_backward, 10 * tolerance(dtype), dtype,
                     rows, cols, x, gamma, mean, rstd, dy, dx, dgamma, dbeta,
                     wanted.accumulate);
    }
  }
}

// Many rows: every block walks over several, and leaves a partial sum.
TEST_P(NormParity, SumsOverManyRowsEqualTheCpus) {
  for (const auto& [rows, cols] :
       {NormRows{2100, 8}, {700, 264}, {300, 2056}}) {
    SCOPED_TRACE(testing::Message() << rows << " x " << cols);
    Comparison c;
    const Slot x = c.array(dtype, noise(rows * cols, 1));
    const Slot dy = c.array(dtype, noise(rows * cols, 3));
    const Slot mean = c.array(stat_dtype(dtype), noise(rows, 4));
    const Slot rstd = c.array(stat_dtype(dtype), noise(rows, 5));
    const Slot dgamma = c.empty(dtype, cols), dbeta = c.empty(dtype, cols);
    c.expect_equal(kernels::layer_norm_backward, 50 * tolerance(dtype), dtype,
                   rows, cols, x, c.null(), mean, rstd, dy, c.null(), dgamma,
                   dbeta, false);
  }
}

const ChannelShape kChannelShapes[] = {{0, 3, 4},   {1, 1, 1},  {4, 3, 1},
                                       {4, 3, 6},   {4, 3, 50}, {3, 40, 33},
                                       {2, 2, 9001}};

/// The arrays of one comparison of channel kernels.
struct ChannelArrays {
  ChannelArrays(Comparison& c, DType dtype, const ChannelShape& shape)
      : n(shape.batch * shape.channels * shape.inner),
        x(c.array(dtype, noise(n, 1))),
        dy(c.array(dtype, noise(n, 2))),
        mean(c.array(DType::kF64, noise(shape.channels, 3))),
        rstd(c.array(DType::kF64, noise(shape.channels, 4))),
        first(c.array(DType::kF64, noise(shape.channels, 5))),
        second(c.array(DType::kF64, noise(shape.channels, 6))),
        gamma(c.array(dtype, noise(shape.channels, 7))),
        beta(c.array(dtype, noise(shape.channels, 8))) {}
  std::int64_t n;
  Slot x, dy, mean, rstd, first, second, gamma, beta;
};

TEST_P(NormParity, ChannelSumsEqualTheCpus) {
  for (const ChannelShape& shape : kChannelShapes) {
    SCOPED_TRACE(testing::Message() << shape.batch << " x " << shape.channels
                                    << " x " << shape.inner);
    // Terms are f64 whatever the dtype.
    const double close = 1e-13 * static_cast<double>(shape.inner + 100);
    {
      Comparison c;
      const ChannelArrays a(c, dtype, shape);
      c.expect_equal(kernels::channel_sums, close, dtype, shape, a.x, a.first);
    }
    {
      Comparison c;
      const ChannelArrays a(c, dtype, shape);
      c.expect_equal(kernels::channel_centered_squares, close, dtype, shape,
                     a.x, a.mean, a.first);
    }
    Comparison c;
    const ChannelArrays a(c, dtype, shape);
    c.expect_equal(kernels::channel_backward_sums, close, dtype, shape, a.x,
                   a.dy, a.mean, a.rstd, a.first, a.second);
  }
}

TEST_P(NormParity, ChannelNormalizeEqualsTheCpu) {
  for (const ChannelShape& shape : kChannelShapes) {
    for (const bool affine : {true, false}) {
      SCOPED_TRACE(testing::Message() << shape.batch << " x " << shape.channels
                                      << " x " << shape.inner);
      {
        Comparison c;
        const ChannelArrays a(c, dtype, shape);
        const Slot y = affine ? c.empty(dtype, a.n) : a.x;
        c.expect_equal(kernels::channel_normalize, tolerance(dtype), dtype,
                       shape, a.x, a.mean, a.rstd, affine ? a.gamma : c.null(),
                       affine ? a.beta : c.null(), y);
      }
      Comparison c;
      const ChannelArrays a(c, dtype, shape);
      const Slot dx = affine ? c.empty(dtype, a.n) : a.dy;
      c.expect_equal(kernels::channel_backward, tolerance(dtype), dtype, shape,
                     a.x, a.dy, a.mean, a.rstd, affine ? a.gamma : c.null(),
                     a.first, a.second, 7.0, dx);
    }
  }
}

SB_PARITY_OVER_FLOATING_DTYPES(NormParity);

TEST(NormParityErrors, RowsOfNothing) {
  CudaContext context;
  EXPECT_THROW(
      kernels::layer_norm(context.kernels(), DType::kF32, 1, 0, kEps, nullptr,
                          nullptr, nullptr, nullptr, nullptr, nullptr),
      Error);
}

}  // namespace
}  // namespace shardbook::parity
