#include <cmath>
#include <vector>

#include "core/kernels/batch_norm.h"
#include "tests/cuda/parity.h"

namespace shardbook::parity {
namespace {

using kernels::RowNorm;
using kernels::tolerance;

/// None, one, odd; one thread across and 32; one block and many.
const std::vector<Matrix> kNormMatrices = {{0, 4},    {1, 1},    {5, 3},
                                           {3, 300},  {200, 16}, {130, 37},
                                           {40, 520}, {3000, 1}, {700, 64}};

class BatchNormParity : public ParityTest {
 protected:
  /// Rows add in f32 (f64 in f64), each block around a row of its own.
  double close(std::int64_t rows) const {
    return (dtype == DType::kF64 ? 1e-14 : 5e-7) *
           (10 + std::sqrt(static_cast<double>(rows)));
  }
};

TEST_P(BatchNormParity, MomentsEqualTheCpus) {
  std::vector<Matrix> matrices = kNormMatrices;
  matrices.push_back({5000, 33});  // a thread adds several rows
  for (const Matrix& m : matrices) {
    for (const double center : {0.0, 100.0}) {
      Comparison c(dtype);
      c.expect_equal(kernels::row_moments, close(m.rows), dtype, m.rows, m.cols,
                     c.array(scaled(1, kernels::noise(m.size(), 1), center)),
                     c.empty(DType::kF64, m.cols),
                     c.empty(DType::kF64, m.cols));
    }
  }
}

/// A matrix, and the arrays of a RowNorm for it.
struct NormComparison : Comparison {
  NormComparison(DType dtype, const Matrix& m)
      : Comparison(dtype),
        matrix(m),
        mean(noise(DType::kF64, m.cols, 3)),
        rstd(noise(DType::kF64, m.cols, 4)),
        gamma(noise(m.cols, 5)),
        beta(noise(m.cols, 6)),
        x(noise(m.size(), 1)),
        dy(noise(m.size(), 2)) {}
  RowNorm norm(const Side& on, bool relu) const {
    return {matrix.rows, matrix.cols, on(mean), on(rstd),
            on(gamma),   on(beta),    relu};
  }
  Matrix matrix;
  Slot mean, rstd, gamma, beta, x, dy;
};

TEST_P(BatchNormParity, NormalizeEqualsTheCpu) {
  for (const Matrix& m : kNormMatrices) {
    for (const bool relu : {false, true}) {
      for (const bool adds : {false, true}) {
        NormComparison c(dtype, m);
        const Slot addend = adds ? c.dy : c.null();
        // Into an array of its own, and over x
        const Slot y = relu ? c.x : c.empty(m.size());
        c.expect_equal_in(tolerance(dtype), [&](const auto& on) {
          kernels::row_normalize(on.context, dtype, c.norm(on, relu), on(c.x),
                                 on(addend), on(y));
        });
      }
    }
  }
}

// With the ReLU's output at hand, with the ReLU computed again, without one.
TEST_P(BatchNormParity, BackwardSumsEqualTheCpus) {
  for (const Matrix& m : kNormMatrices) {
    for (const bool has_y : {false, true}) {
      for (const bool relu : {false, true}) {
        NormComparison c(dtype, m);
        const Slot y = has_y ? c.noise(m.size(), 7) : c.null();
        const Slot dz = !has_y ? c.null() : relu ? c.dy : c.empty(m.size());
        const Slot sums = c.empty(DType::kF64, m.cols);
        const Slot sums_xhat = c.empty(DType::kF64, m.cols);
        c.expect_equal_in(close(m.rows), [&](const auto& on) {
          kernels::row_norm_backward_sums(on.context, dtype, c.norm(on, relu),
                                          on(c.x), on(y), on(c.dy), on(dz),
                                          on(sums), on(sums_xhat));
        });
      }
    }
  }
}

TEST_P(BatchNormParity, BackwardEqualsTheCpu) {
  for (const Matrix& m : kNormMatrices) {
    for (const bool relu : {false, true}) {
      NormComparison c(dtype, m);
      const Slot sums = c.noise(DType::kF64, m.cols, 8);
      const Slot sums_xhat = c.noise(DType::kF64, m.cols, 9);
      const Slot dx = relu ? c.dy : c.empty(m.size());
      c.expect_equal_in(2 * tolerance(dtype), [&](const auto& on) {
        kernels::row_norm_backward(on.context, dtype, c.norm(on, relu), on(c.x),
                                   on(c.dy), on(sums), on(sums_xhat), 7.0,
                                   on(dx));
      });
    }
  }
}

SB_OVER_FLOATING_DTYPES(BatchNormParity);

}  // namespace
}  // namespace shardbook::parity
