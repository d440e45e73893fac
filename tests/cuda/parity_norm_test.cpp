#include "core/kernels/norm.h"
#include "tests/cuda/parity.h"

namespace shardbook::parity {
namespace {

using kernels::ChannelShape;
using kernels::noise;
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

class NormParity : public ParityTest {};

TEST_P(NormParity, LayerNormEqualsTheCpu) {
  for (const auto& [rows, cols] : kNormRows) {
    for (const bool affine : {true, false}) {
      Comparison c(dtype);
      const Slot x = c.array(scaled(1, noise(rows * cols, 1), 3));
      const Slot gamma = affine ? c.noise(cols, 2) : c.null();
      const Slot beta = affine ? c.noise(cols, 3) : c.null();
      // Into an array of its own, and over x
      for (const Slot y : {c.empty(rows * cols), x}) {
        c.expect_equal(kernels::layer_norm, 4 * tolerance(dtype), dtype, rows,
                       cols, kEps, x, gamma, beta, y, c.empty(stat, rows),
                       c.empty(stat, rows));
      }
    }
  }
}

/// Which gradients layer_norm_backward is asked for.
struct WantedGradients {
  bool dx = false, dgamma = false, dbeta = false;
  bool accumulate = false, in_place = false;
};

TEST_P(NormParity, LayerNormBackwardEqualsTheCpu) {
  const WantedGradients cases[] = {
      {.dx = true, .dgamma = true, .dbeta = true, .accumulate = true},
      {.dx = true, .dgamma = true, .dbeta = true, .in_place = true},
      {.dx = true, .in_place = true},
      {.dgamma = true}};
  for (const auto& [rows, cols] : kNormRows) {
    for (const WantedGradients& wanted : cases) {
      Comparison c(dtype);
      const auto noise_if = [&, n = cols](bool wants, int seed) {
        return wants ? c.noise(n, seed) : c.null();
      };
      const Slot dy = c.noise(rows * cols, 3);
      const Slot dx = !wanted.dx        ? c.null()
                      : wanted.in_place ? dy
                                        : c.empty(rows * cols);
      c.expect_equal(kernels::layer_norm_backward, 10 * tolerance(dtype), dtype,
                     rows, cols, c.noise(rows * cols, 1),
                     noise_if(wanted.accumulate, 2), c.noise(stat, rows, 4),
                     c.array(stat, scaled(1, noise(rows, 5), 2)), dy, dx,
                     noise_if(wanted.dgamma, 6), noise_if(wanted.dbeta, 7),
                     wanted.accumulate);
    }
  }
}

// Many rows: every block walks over several, and leaves a partial sum.
TEST_P(NormParity, SumsOverManyRowsEqualTheCpus) {
  for (const auto& [rows, cols] :
       {NormRows{2100, 8}, {700, 264}, {300, 2056}}) {
    Comparison c(dtype);
    c.expect_equal(kernels::layer_norm_backward, 50 * tolerance(dtype), dtype,
                   rows, cols, c.noise(rows * cols, 1), c.null(),
                   c.noise(stat, rows, 4), c.noise(stat, rows, 5),
                   c.noise(rows * cols, 3), c.null(), c.empty(cols),
                   c.empty(cols), false);
  }
}

const ChannelShape kChannelShapes[] = {{0, 3, 4},   {1, 1, 1},  {4, 3, 1},
                                       {4, 3, 6},   {4, 3, 50}, {3, 40, 33},
                                       {2, 2, 9001}};

/// The arrays of one comparison of channel kernels.
struct ChannelComparison : Comparison {
  ChannelComparison(DType dtype, const ChannelShape& shape)
      : Comparison(dtype),
        n(shape.batch * shape.channels * shape.inner),
        x(noise(n, 1)),
        dy(noise(n, 2)),
        mean(noise(DType::kF64, shape.channels, 3)),
        rstd(noise(DType::kF64, shape.channels, 4)),
        first(noise(DType::kF64, shape.channels, 5)),
        second(noise(DType::kF64, shape.channels, 6)),
        gamma(noise(shape.channels, 7)),
        beta(noise(shape.channels, 8)) {}
  std::int64_t n;
  Slot x, dy, mean, rstd, first, second, gamma, beta;
};

TEST_P(NormParity, ChannelSumsEqualTheCpus) {
  for (const ChannelShape& shape : kChannelShapes) {
    // Terms are f64 whatever the dtype.
    const double close = 1e-13 * static_cast<double>(shape.inner + 100);
    ChannelComparison a(dtype, shape), b(dtype, shape), c(dtype, shape);
    a.expect_equal(kernels::channel_sums, close, dtype, shape, a.x, a.first);
    b.expect_equal(kernels::channel_centered_squares, close, dtype, shape, b.x,
                   b.mean, b.first);
    c.expect_equal(kernels::channel_backward_sums, close, dtype, shape, c.x,
                   c.dy, c.mean, c.rstd, c.first, c.second);
  }
}

TEST_P(NormParity, ChannelNormalizeEqualsTheCpu) {
  for (const ChannelShape& shape : kChannelShapes) {
    for (const bool affine : {true, false}) {
      ChannelComparison c(dtype, shape), back(dtype, shape);
      const Slot y = affine ? c.empty(c.n) : c.x;
      c.expect_equal(kernels::channel_normalize, tolerance(dtype), dtype, shape,
                     c.x, c.mean, c.rstd, affine ? c.gamma : c.null(),
                     affine ? c.beta : c.null(), y);
      const Slot dx = affine ? back.empty(back.n) : back.dy;
      back.expect_equal(kernels::channel_backward, tolerance(dtype), dtype,
                        shape, back.x, back.dy, back.mean, back.rstd,
                        affine ? back.gamma : back.null(), back.first,
                        back.second, 7.0, dx);
    }
  }
}

SB_PARITY_OVER_FLOATING_DTYPES(NormParity);

}  // namespace
}  // namespace shardbook::parity
