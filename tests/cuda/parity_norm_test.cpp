#include "core/kernels/norm.h"
#include "tests/cuda/parity.h"

namespace shardbook::parity {
namespace {

using kernels::noise;
using kernels::tolerance;

constexpr double kEps = 1e-5;

/// None, one, odd; a warp, 128 and 256 threads for a row, and RMSNorm's eight
/// for a row of up to 128; rows in registers, and longer ones; whole vectors and
/// single elements.
const Matrix kNormRows[] = {{0, 4},    {1, 1},    {3, 5},    {70, 37},
                            {20, 64},  {35, 128}, {6, 136},  {9, 768},
                            {3, 1000}, {5, 1001}, {3, 2048}, {2, 2047},
                            {2, 4096}, {2, 8200}, {2, 8193}};

class NormParity : public ParityTest {};

TEST_P(NormParity, LayerNormEqualsTheCpu) {
  for (const auto& [rows, cols] : kNormRows) {
    Comparison c(dtype);
    const Slot x = c.array(scaled(1, noise(rows * cols, 1), 3));
    const Slot gamma = c.noise(cols, 2), beta = c.noise(cols, 3);
    // Into an array of its own, and over x
    for (const Slot y : {c.empty(rows * cols), x}) {
      c.expect_equal(kernels::layer_norm, 4 * tolerance(dtype), dtype, rows,
                     cols, kEps, x, gamma, beta, y, c.empty(stat, rows),
                     c.empty(stat, rows));
    }
  }
}

TEST_P(NormParity, RmsNormEqualsTheCpu) {
  for (const auto& [rows, cols] : kNormRows) {
    Comparison c(dtype);
    const Slot x = c.array(scaled(1, noise(rows * cols, 1), 0.5));
    const Slot weight = c.noise(cols, 2);
    for (const Slot y : {c.empty(rows * cols), x}) {
      c.expect_equal(kernels::rms_norm, 4 * tolerance(dtype), dtype, rows, cols,
                     kEps, x, weight, y, c.empty(stat, rows));
    }
  }
}

/// Which gradients a backward is asked for.
struct WantedGradients {
  bool dx = false, sums = false, in_place = false;
};
const WantedGradients kWanted[] = {{.dx = true, .sums = true},
                                   {.dx = true, .sums = true, .in_place = true},
                                   {.dx = true, .in_place = true},
                                   {.sums = true}};

TEST_P(NormParity, LayerNormBackwardEqualsTheCpu) {
  for (const auto& [rows, cols] : kNormRows) {
    for (const WantedGradients& wanted : kWanted) {
      Comparison c(dtype);
      const Slot dy = c.noise(rows * cols, 3);
      const Slot dx = !wanted.dx        ? c.null()
                      : wanted.in_place ? dy
                                        : c.empty(rows * cols);
      c.expect_equal(kernels::layer_norm_backward, 10 * tolerance(dtype), dtype,
                     rows, cols, c.noise(rows * cols, 1), c.noise(cols, 2),
                     c.noise(stat, rows, 4),
                     c.array(stat, scaled(1, noise(rows, 5), 2)), dy, dx,
                     wanted.sums ? c.noise(cols, 6) : c.null(),
                     wanted.sums ? c.noise(cols, 7) : c.null());
    }
  }
}

TEST_P(NormParity, RmsNormBackwardEqualsTheCpu) {
  for (const auto& [rows, cols] : kNormRows) {
    for (const WantedGradients& wanted : kWanted) {
      Comparison c(dtype);
      const Slot dy = c.noise(rows * cols, 3);
      const Slot dx = !wanted.dx        ? c.null()
                      : wanted.in_place ? dy
                                        : c.empty(rows * cols);
      c.expect_equal(kernels::rms_norm_backward, 10 * tolerance(dtype), dtype,
                     rows, cols, c.noise(rows * cols, 1), c.noise(cols, 2),
                     c.array(stat, scaled(1, noise(rows, 5), 2)), dy, dx,
                     wanted.sums ? c.noise(cols, 6) : c.null());
    }
  }
}

// Many rows: every block walks over several, and leaves a partial sum.
TEST_P(NormParity, SumsOverManyRowsEqualTheCpus) {
  for (const auto& [rows, cols] : {Matrix{2100, 8}, {700, 264}, {300, 2056}}) {
    Comparison c(dtype);
    c.expect_equal(kernels::layer_norm_backward, 50 * tolerance(dtype), dtype,
                   rows, cols, c.noise(rows * cols, 1), c.noise(cols, 2),
                   c.noise(stat, rows, 4), c.noise(stat, rows, 5),
                   c.noise(rows * cols, 3), c.null(), c.empty(cols),
                   c.empty(cols));
    c.expect_equal(kernels::rms_norm_backward, 50 * tolerance(dtype), dtype,
                   rows, cols, c.noise(rows * cols, 1), c.noise(cols, 2),
                   c.noise(stat, rows, 5), c.noise(rows * cols, 3), c.null(),
                   c.empty(cols));
  }
}

SB_OVER_FLOATING_DTYPES(NormParity);

}  // namespace
}  // namespace shardbook::parity
