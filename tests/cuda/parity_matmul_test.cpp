#include "core/kernels/matmul.h"

#include <array>
#include <cmath>

#include "core/kernels/matmul_gelu.h"
#include "tests/cuda/parity.h"

namespace shardbook::parity {
namespace {

using kernels::MatmulArgs;
using kernels::noise;
using kernels::tolerance;

class MatmulParity : public ParityTest {
 protected:
  /// Sums of k products, at each of which f32 may round anew.
  double bound(std::int64_t k) const {
    return tolerance(dtype) * (1 + static_cast<double>(k) / 64);
  }
  /// Compares products of random matrices.
  void compare(const MatmulArgs& args, bool with_bias) {
    SCOPED_TRACE(testing::Message()
                 << args.batch << " x [" << args.m << ", " << args.k << "] x ["
                 << args.k << ", " << args.n << "], transposed " << args.trans_a
                 << args.trans_b << ", bias " << with_bias);
    const auto size = [&](std::int64_t rows, std::int64_t cols, std::int64_t ld,
                          std::int64_t stride) {
      const std::int64_t one =
          rows == 0 ? 0 : (rows - 1) * (ld ? ld : cols) + cols;
      return (args.batch - 1) * stride + one;
    };
    const std::int64_t a_size =
        args.trans_a ? size(args.k, args.m, args.lda, args.stride_a)
                     : size(args.m, args.k, args.lda, args.stride_a);
    const std::int64_t b_size =
        args.trans_b ? size(args.n, args.k, args.ldb, args.stride_b)
                     : size(args.k, args.n, args.ldb, args.stride_b);
    const std::int64_t c_size = size(args.m, args.n, args.ldc, args.stride_c);
    Comparison c;
    const Slot a = c.array(dtype, noise(a_size, 1));
    const Slot b = c.array(dtype, noise(b_size, 2));
    const Slot y = c.array(dtype, noise(c_size, 3));
    const Slot bias =
        with_bias ? c.array(dtype, noise(args.n, 4)) : Comparison::null();
    c.expect_equal(kernels::matmul, bound(args.k), dtype, args, a, b, y, bias);
  }
};

MatmulArgs product(std::int64_t m, std::int64_t n, std::int64_t k,
                   bool trans_a = false, bool trans_b = false) {
  MatmulArgs args;
  args.m = m, args.n = n, args.k = k;
  args.trans_a = trans_a, args.trans_b = trans_b;
  return args;
}

TEST_P(MatmulParity, SizesAndTranspositionsEqualTheCpus) {
  for (const auto& [m, n, k] : {std::array<std::int64_t, 3>{1, 1, 1},
                                {1, 33, 7},
                                {17, 1, 40},
                                {0, 4, 4},
                                {5, 6, 0},
                                {64, 48, 96},
                                {65, 31, 129}}) {
    for (const bool trans_a : {false, true}) {
      for (const bool trans_b : {false, true}) {
        compare(product(m, n, k, trans_a, trans_b), /*with_bias=*/false);
        compare(product(m, n, k, trans_a, trans_b), /*with_bias=*/true);
      }
    }
  }
}

TEST_P(MatmulParity, AddsToWhatIsThere) {
  for (const bool with_bias : {false, true}) {
    MatmulArgs args = product(33, 20, 47);
    args.accumulate = true;
    compare(args, with_bias);
  }
}

TEST_P(MatmulParity, RowsMayBeApart) {
  MatmulArgs args = product(9, 13, 21, false, true);
  args.lda = 24, args.ldb = 22, args.ldc = 17;
  args.accumulate = true;  // what lies between the rows stays as it was
  compare(args, /*with_bias=*/true);
}

TEST_P(MatmulParity, ProductsOfABatchMayShareAnOperand) {
  MatmulArgs args = product(10, 12, 14);
  args.batch = 3;
  args.stride_a = 140, args.stride_b = 168, args.stride_c = 120;
  compare(args, /*with_bias=*/false);
  compare(args, /*with_bias=*/true);
  args.stride_a = 0;
  compare(args, /*with_bias=*/false);
  args.stride_a = 140, args.stride_b = 0;
  compare(args, /*with_bias=*/false);
}

SB_PARITY_OVER_FLOATING_DTYPES(MatmulParity);

/// GELU behind the product, and its derivative behind the product of the
/// backward; with TF32, f32 meets cuBLASLt's epilogues too.
class MatmulGeluParity : public MatmulParity {
 protected:
  /// The tanh of a GPU has 11 bits, and so have TF32's operands.
  double close(std::int64_t k, bool tf32) const {
    if (!tf32) return 2 * bound(k);
    return 1e-3 * (1 + std::sqrt(static_cast<double>(k)));
  }
  void compare_gelu(const MatmulArgs& args, bool with_bias, bool tf32) {
    SCOPED_TRACE(testing::Message()
                 << "[" << args.m << ", " << args.k << "] x [" << args.k << ", "
                 << args.n << "], transposed " << args.trans_a << args.trans_b
                 << ", bias " << with_bias << ", TF32 " << tf32);
    const std::vector<double> a = noise(args.m * args.k, 1),
                              b = noise(args.k * args.n, 2);
    {
      Comparison c;
      c.cuda().allow_tf32 = tf32;
      const Slot bias =
          with_bias ? c.array(dtype, noise(args.n, 3)) : Comparison::null();
      c.expect_equal(kernels::matmul_gelu, close(args.k, tf32), dtype, args,
                     c.array(dtype, a), c.array(dtype, b), bias,
                     c.empty(dtype, args.m * args.n),
                     c.empty(dtype, args.m * args.n));
    }
    // From where gelu' is 0 to where it is 1
    std::vector<double> pre = noise(args.m * args.n, 4);
    for (double& x : pre) x *= 6;
    Comparison c;
    c.cuda().allow_tf32 = tf32;
    const Slot dbias = with_bias ? c.empty(dtype, args.n) : Comparison::null();
    // The bias' gradient adds m elements, of sqrt(k)
    c.expect_equal(kernels::matmul_gelu_backward,
                   close(args.k, tf32) * (1 + static_cast<double>(args.m) / 16),
                   dtype, args, c.array(dtype, a), c.array(dtype, b),
                   c.array(dtype, pre), c.empty(dtype, args.m * args.n), dbias);
  }
};

TEST_P(MatmulGeluParity, SizesAndTranspositionsEqualTheCpus) {
  for (const auto& [m, n, k] : {std::array<std::int64_t, 3>{1, 1, 1},
                                {1, 8, 1},
                                {7, 33, 5},
                                {17, 16, 40},
                                {0, 8, 4},
                                {5, 0, 4},
                                {5, 8, 0},
                                {33, 24, 129},
                                {3, 1032, 17}}) {
    for (const bool with_bias : {false, true}) {
      for (const bool transposed : {false, true}) {
        compare_gelu(product(m, n, k, false, transposed), with_bias, false);
      }
      if (dtype != DType::kF32) continue;
      compare_gelu(product(m, n, k, true, false), with_bias, /*tf32=*/true);
    }
  }
}

SB_PARITY_OVER_FLOATING_DTYPES(MatmulGeluParity);

}  // namespace
}  // namespace shardbook::parity
