// The mapping of row-major products to column-major ones, by a naive
// column-major product that knows nothing else than what cuBLASLt is told.

#include "core/kernels/cuda/matmul_layout.h"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "tests/kernels/support.h"

namespace shardbook::kernels {
namespace {

using cuda::ColumnMajor;
using cuda::ColumnMajorProduct;

// Element (row, col) of a factor, as it enters the product.
double element(const ColumnMajor& x, const std::vector<double>& values,
               std::int64_t item, std::int64_t row, std::int64_t col) {
  if (x.transposed) std::swap(row, col);
  EXPECT_LT(row, x.rows);
  EXPECT_LT(col, x.cols);
  EXPECT_GE(x.ld, x.rows);
  return values.at(item * x.stride + col * x.ld + row);
}

// What cuBLASLt computes: c = left right + beta c + bias along rows.
void multiply(const ColumnMajorProduct& p, const std::vector<double>& left,
              const std::vector<double>& right, std::vector<double>* c,
              const std::vector<double>& bias, double beta) {
  EXPECT_EQ(p.c.rows, p.m);
  EXPECT_EQ(p.c.cols, p.n);
  EXPECT_FALSE(p.c.transposed);
  for (std::int64_t item = 0; item < p.batch; ++item) {
    for (std::int64_t col = 0; col < p.n; ++col) {
      for (std::int64_t row = 0; row < p.m; ++row) {
        double& to = c->at(item * p.c.stride + col * p.c.ld + row);
        double sum = bias.empty() ? 0.0 : bias.at(row);
        for (std::int64_t k = 0; k < p.k; ++k) {
          sum += element(p.left, left, item, row, k) *
                 element(p.right, right, item, k, col);
        }
        to = sum + (beta == 0.0 ? 0.0 : beta * to);
      }
    }
  }
}

void check(const MatmulArgs& args, bool with_bias) {
  const auto a = noise(args.batch * args.m * args.k, 1);
  const auto b = noise(args.batch * args.k * args.n, 2);
  const auto bias = with_bias ? noise(args.n, 3) : std::vector<double>();
  const auto before = noise(args.batch * args.m * args.n, 4);
  auto expected = before, found = before;
  KernelContext context;
  matmul(context, DType::kF64, args, a.data(), b.data(), expected.data(),
         with_bias ? bias.data() : nullptr);
  multiply(cuda::column_major(args), b, a, &found, bias,
           args.resume ? 1.0 : 0.0);
  expect_close(found, expected, 1e-13);
}

TEST(MatmulLayout, RowMajorProductsAreColumnMajorOnesTransposed) {
  for (const bool trans_a : {false, true}) {
    for (const bool trans_b : {false, true}) {
      for (const bool resume : {false, true}) {
        MatmulArgs args;
        args.m = 3, args.n = 4, args.k = 5;
        args.trans_a = trans_a, args.trans_b = trans_b;
        args.resume = resume;
        check(args, false);
        check(args, true);
        args.batch = 3;
        check(args, true);
      }
    }
  }
}

// What cuBLASLt documents for the auxiliary matrix of its GELU epilogues, and
// where its tanh is accurate enough.
TEST(MatmulLayout, GeluIsFusedWhereCublasltMay) {
  MatmulArgs args;
  args.m = 3, args.n = 16, args.k = 5;
  KernelContext context;
  const auto may_fuse = [&](DType dtype) {
    return cuda::may_fuse_gelu(context, dtype, args);
  };
  EXPECT_TRUE(may_fuse(DType::kBF16));
  EXPECT_TRUE(may_fuse(DType::kF16));
  EXPECT_FALSE(may_fuse(DType::kF32));
  EXPECT_FALSE(may_fuse(DType::kF64));
  context.allow_tf32 = true;
  EXPECT_TRUE(may_fuse(DType::kF32));
  EXPECT_FALSE(may_fuse(DType::kF64));
  for (const std::int64_t n : {1, 4, 12, 15, 17, 0}) {
    args.n = n;
    EXPECT_FALSE(may_fuse(DType::kBF16)) << n;
  }
  args.n = 8;
  EXPECT_TRUE(may_fuse(DType::kBF16));
  args.m = 0;
  EXPECT_FALSE(may_fuse(DType::kBF16));
  args.m = 1, args.k = 0;
  EXPECT_FALSE(may_fuse(DType::kBF16));
  args.k = 1;
  EXPECT_TRUE(may_fuse(DType::kBF16));
  context.deterministic = true;
  EXPECT_FALSE(may_fuse(DType::kBF16));
}

}  // namespace
}  // namespace shardbook::kernels
