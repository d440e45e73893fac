#include "core/kernels/matmul.h"

#include <cmath>
#include <utility>

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
                 << "transposed " << args.trans_a << args.trans_b);
    Comparison c(dtype);
    c.expect_equal(kernels::matmul, bound(args.k), dtype, args,
                   c.noise(args.batch * args.m * args.k, 1),
                   c.noise(args.batch * args.k * args.n, 2),
                   c.noise(args.batch * args.m * args.n, 3),
                   with_bias ? c.noise(args.n, 4) : c.null());
  }
};

MatmulArgs product(std::int64_t m, std::int64_t n, std::int64_t k,
                   bool trans_a = false, bool trans_b = false) {
  MatmulArgs args;
  args.m = m, args.n = n, args.k = k;
  args.trans_a = trans_a, args.trans_b = trans_b;
  return args;
}

struct ProductSizes {
  std::int64_t m, n, k;
};

TEST_P(MatmulParity, SizesAndTranspositionsEqualTheCpus) {
  const ProductSizes all[] = {{1, 1, 1},    {1, 33, 7},   {17, 1, 40},
                              {0, 4, 4},    {5, 6, 0},    {64, 48, 96},
                              {33, 20, 47}, {65, 31, 129}};
  for (const auto& [m, n, k] : all) {
    for (const bool trans_a : {false, true}) {
      for (const bool trans_b : {false, true}) {
        for (const bool with_bias : {false, true}) {
          MatmulArgs args = product(m, n, k, trans_a, trans_b);
          compare(args, with_bias);
          args.resume = true;  // adds to what is there
          compare(args, with_bias);
        }
      }
    }
  }
}

TEST_P(MatmulParity, ProductsOfABatchEqualTheCpus) {
  MatmulArgs args = product(10, 12, 14);
  args.batch = 3;
  compare(args, /*with_bias=*/false);
  compare(args, /*with_bias=*/true);
}

SB_OVER_FLOATING_DTYPES(MatmulParity);

/// Products of 16 bits, which are computed on padded copies.
class PaddedMatmulParity : public MatmulParity {};

TEST_P(PaddedMatmulParity, LargeProductsOfOddSizesEqualTheCpus) {
  for (const bool trans_a : {false, true}) {
    for (const bool trans_b : {false, true}) {
      MatmulArgs args = product(257, 259, 260, trans_a, trans_b);
      compare(args, /*with_bias=*/false);
      compare(args, /*with_bias=*/true);
      args.resume = true;
      compare(args, /*with_bias=*/false);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, PaddedMatmulParity,
                         testing::Values(DType::kBF16, DType::kF16),
                         dtype_test_name);

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
    SCOPED_TRACE(testing::Message() << "transposed " << args.trans_a
                                    << args.trans_b << ", TF32 " << tf32);
    const std::int64_t n = args.m * args.n;
    const auto factors = [&](Comparison& c) {
      c.cuda().allow_tf32 = tf32;
      return std::pair(c.noise(args.m * args.k, 1),
                       c.noise(args.k * args.n, 2));
    };
    Comparison forward(dtype), backward(dtype);
    const auto [a, b] = factors(forward);
    forward.expect_equal(kernels::matmul_gelu, close(args.k, tf32), dtype, args,
                         a, b,
                         with_bias ? forward.noise(args.n, 3) : forward.null(),
                         forward.empty(n), forward.empty(n));
    const auto [dy, w] = factors(backward);
    // From where gelu' is 0 to where it is 1
    const Slot pre = backward.array(scaled(6, noise(n, 4)));
    // The bias' gradient adds m elements, of sqrt(k)
    backward.expect_equal(
        kernels::matmul_gelu_backward,
        close(args.k, tf32) * (1 + static_cast<double>(args.m) / 16), dtype,
        args, dy, w, pre, backward.empty(n),
        with_bias ? backward.empty(args.n) : backward.null());
  }
};

TEST_P(MatmulGeluParity, SizesAndTranspositionsEqualTheCpus) {
  const ProductSizes all[] = {{1, 1, 1},    {1, 8, 1},     {7, 33, 5},
                              {17, 16, 40}, {0, 8, 4},     {5, 0, 4},
                              {5, 8, 0},    {33, 24, 129}, {3, 1032, 17}};
  for (const auto& [m, n, k] : all) {
    for (const bool with_bias : {false, true}) {
      for (const bool transposed : {false, true}) {
        compare_gelu(product(m, n, k, false, transposed), with_bias, false);
      }
      if (dtype != DType::kF32) continue;
      compare_gelu(product(m, n, k, true, false), with_bias, /*tf32=*/true);
    }
  }
}

SB_OVER_FLOATING_DTYPES(MatmulGeluParity);

}  // namespace
}  // namespace shardbook::parity
