#include "core/kernels/matmul.h"

#include <array>

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

}  // namespace
}  // namespace shardbook::parity
