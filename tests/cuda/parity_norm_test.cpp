#include "core/kernels/norm.h"
#include "tests/cuda/parity.h"

namespace shardbook::parity {
namespace {

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
  bool dx, dgamma, dbeta, has_gamma, in_place;
};

TEST_P(NormParity, LayerNormBackwardEqualsTheCpu) {
  const WantedGradients cases[] = {
      {.dx = true, .dgamma = true, .dbeta = true, .accumulate = true},
      {.dx = true, .dgamma = true, .dbeta = true, .in_place = true},
      {.dx = true, .in_place = true},
      {.dgamma = true}};
  for (const auto& [rows, cols] : kNormRows) {
    for (const WantedGradients& wanted : cases) {
      SCOPED_TRACE(testing::Message()
                   << rows << " x " << cols << " dx " << wanted.dx << " dgamma "
                   << wanted.dgamma << " dbeta " << wanted.dbeta);
      Comparison c;
      const Slot x = c.array(dtype, noise(rows * cols, 1));
      const Slot gamma =
          wanted.has_gamma ? c.array(dtype, noise(cols, 2)) : c.null();
      const Slot dy = c.array(dtype, noise(rows * cols, 3));
      const Slot mean = c.array(stat_dtype(dtype), noise(rows, 4));
      const Slot rstd =
          c.array(stat_dtype(dtype), shifted(2.0, noise(rows, 5)));
      const Slot dx = !wanted.dx        ? c.null()
                      : wanted.in_place ? dy
                                        : c.empty(rows * cols);
      c.expect_equal(kernels::layer_norm_backward, 10 * tolerance(dtype), dtype,
                     rows, cols, x, gamma, mean, rstd, dy, dx, dgamma, dbeta);
    }
  }
}

// Many rows: every block walks over several, and leaves a partial sum.
TEST_P(NormParity, SumsOverManyRowsEqualTheCpus) {
  for (const auto& [rows, cols] :
       {NormRows{2100, 8}, {700, 264}, {300, 2056}}) {
    Comparison c(dtype);
    c.expect_equal(kernels::layer_norm_backward, 50 * tolerance(dtype), dtype,
                   rows, cols, x, c.null(), mean, rstd, dy, c.null(), dgamma,
                   dbeta);
  }
}

SB_PARITY_OVER_FLOATING_DTYPES(NormParity);

}  // namespace
}  // namespace shardbook::parity
