#include <cmath>
#include <iterator>
#include <vector>

#include "core/kernels/batch_norm.h"
#include "tests/cuda/parity.h"

namespace shardbook::parity {
namespace {

using kernels::noise;
using kernels::RowNorm;
using kernels::stat_dtype;
using kernels::tolerance;

struct NormMatrix {
  std::int64_t rows, channels;
};
/// None, one, odd; one thread across and 32; one block and many.
const NormMatrix kNormMatrices[] = {{0, 4},    {1, 1},    {5, 3},
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
  std::vector<NormMatrix> matrices(std::begin(kNormMatrices),
                                   std::end(kNormMatrices));
  // A thread adds several rows.
  matrices.push_back({5000, 33});
  for (const auto& [rows, channels] : matrices) {
    for (const double center : {0.0, 100.0}) {
      SCOPED_TRACE(testing::Message() << rows << " x " << channels);
      auto values = noise(rows * channels, 1);
      for (double& v : values) v += center;
      Comparison c;
      const Slot x = c.array(dtype, values);
      const Slot sums = c.empty(DType::kF64, channels);
      const Slot squares = c.empty(DType::kF64, channels);
      c.expect_equal(kernels::row_moments, close(rows), dtype, rows, channels,
                     x, sums, squares);
    }
  }
}

/// The arrays of a RowNorm, and calls with them.
struct NormArrays {
  NormArrays(Comparison& c, DType dtype, const NormMatrix& matrix)
      : mean(c.array(DType::kF64, noise(matrix.channels, 3))),
        rstd(c.array(DType::kF64, noise(matrix.channels, 4))),
        gamma(c.array(dtype, noise(matrix.channels, 5))),
        beta(c.array(dtype, noise(matrix.channels, 6))) {}
  Slot mean, rstd, gamma, beta;
};

TEST_P(BatchNormParity, NormalizeEqualsTheCpu) {
  for (const NormMatrix& m : kNormMatrices) {
    for (const bool relu : {false, true}) {
      for (const bool adds : {false, true}) {
        SCOPED_TRACE(testing::Message() << m.rows << " x " << m.channels);
        const auto run = [&](KernelContext& context, const double* mean,
                             const double* rstd, const void* gamma,
                             const void* beta, const void* x,
                             const void* addend, void* y) {
          const RowNorm norm{m.rows, m.channels, mean, rstd, gamma, beta, relu};
          kernels::row_normalize(context, dtype, norm, x, addend, y);
        };
        Comparison c;
        const NormArrays norm(c, dtype, m);
        const Slot x = c.array(dtype, noise(m.rows * m.channels, 1));
        const Slot addend =
            adds ? c.array(dtype, noise(m.rows * m.channels, 2)) : c.null();
        // Into an array of its own, and over x
        const Slot y = relu ? x : c.empty(dtype, m.rows * m.channels);
        c.expect_equal(run, tolerance(dtype), norm.mean, norm.rstd, norm.gamma,
                       norm.beta, x, addend, y);
      }
    }
  }
}

// With the ReLU's output at hand, with the ReLU computed again, without one.
TEST_P(BatchNormParity, BackwardSumsEqualTheCpus) {
  for (const NormMatrix& m : kNormMatrices) {
    for (const bool has_y : {false, true}) {
      for (const bool relu : {false, true}) {
        SCOPED_TRACE(testing::Message() << m.rows << " x " << m.channels
                                        << " y " << has_y << " relu " << relu);
        const auto run = [&](KernelContext& context, const double* mean,
                             const double* rstd, const void* gamma,
                             const void* beta, const void* x, const void* y,
                             const void* dy, void* dz, double* sum_dz,
                             double* sum_dz_xhat) {
          const RowNorm norm{m.rows, m.channels, mean, rstd, gamma, beta, relu};
          kernels::row_norm_backward_sums(context, dtype, norm, x, y, dy, dz,
                                          sum_dz, sum_dz_xhat);
        };
        const std::int64_t n = m.rows * m.channels;
        Comparison c;
        const NormArrays norm(c, dtype, m);
        const Slot x = c.array(dtype, noise(n, 1));
        const Slot dy = c.array(dtype, noise(n, 2));
        const Slot y = has_y ? c.array(dtype, noise(n, 7)) : c.null();
        const Slot dz = !has_y ? c.null() : relu ? dy : c.empty(dtype, n);
        const Slot sum_dz = c.empty(DType::kF64, m.channels);
        const Slot sum_dz_xhat = c.empty(DType::kF64, m.channels);
        c.expect_equal(run, close(m.rows), norm.mean, norm.rstd, norm.gamma,
                       norm.beta, x, y, dy, dz, sum_dz, sum_dz_xhat);
      }
    }
  }
}

TEST_P(BatchNormParity, BackwardEqualsTheCpu) {
  for (const NormMatrix& m : kNormMatrices) {
    for (const bool relu : {false, true}) {
      SCOPED_TRACE(testing::Message() << m.rows << " x " << m.channels);
      const auto run = [&](KernelContext& context, const double* mean,
                           const double* rstd, const void* gamma,
                           const void* beta, const void* x, const void* dy,
                           const double* sum_dz, const double* sum_dz_xhat,
                           void* dx) {
        const RowNorm norm{m.rows, m.channels, mean, rstd, gamma, beta, relu};
        kernels::row_norm_backward(context, dtype, norm, x, dy, sum_dz,
                                   sum_dz_xhat, 7.0, dx);
      };
      const std::int64_t n = m.rows * m.channels;
      Comparison c;
      const NormArrays norm(c, dtype, m);
      const Slot x = c.array(dtype, noise(n, 1));
      const Slot dy = c.array(dtype, noise(n, 2));
      const Slot sum_dz = c.array(DType::kF64, noise(m.channels, 8));
      const Slot sum_dz_xhat = c.array(DType::kF64, noise(m.channels, 9));
      const Slot dx = relu ? dy : c.empty(dtype, n);
      c.expect_equal(run, 2 * tolerance(dtype), norm.mean, norm.rstd,
                     norm.gamma, norm.beta, x, dy, sum_dz, sum_dz_xhat, dx);
    }
  }
}

SB_PARITY_OVER_FLOATING_DTYPES(BatchNormParity);

}  // namespace
}  // namespace shardbook::parity
