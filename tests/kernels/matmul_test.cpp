#include "core/kernels/matmul.h"

#include <cmath>

#include "core/check.h"
#include "core/kernels/matmul_gelu.h"
#include "tests/kernels/support.h"

namespace shardbook::kernels {
namespace {

struct Problem {
  MatmulArgs args;
  std::vector<double> a, b, c, bias;
};

Problem problem(std::int64_t batch, std::int64_t m, std::int64_t n,
                std::int64_t k, bool trans_a, bool trans_b) {
  return {{batch, m, n, k, trans_a, trans_b},
          noise(batch * m * k, 1),
          noise(batch * k * n, 2),
          noise(batch * m * n, 3),
          noise(n, 4)};
}

// The definition, on values as the dtype holds them.
std::vector<double> reference(const MatmulArgs& args,
                              const std::vector<double>& a,
                              const std::vector<double>& b,
                              std::vector<double> c,
                              const std::vector<double>* bias) {
  const std::int64_t m = args.m, n = args.n, k = args.k;
  for (std::int64_t i = 0; i < args.batch; ++i) {
    for (std::int64_t r = 0; r < m; ++r) {
      for (std::int64_t j = 0; j < n; ++j) {
        double sum = 0.0;
        for (std::int64_t p = 0; p < k; ++p) {
          sum += a[i * m * k + (args.trans_a ? p * m + r : r * k + p)] *
                 b[i * k * n + (args.trans_b ? j * k + p : p * n + j)];
        }
        double& out = c[(i * m + r) * n + j];
        out = (args.resume ? out : 0.0) + sum + (bias ? (*bias)[j] : 0.0);
      }
    }
  }
  return c;
}

double product_tolerance(DType dtype, std::int64_t k) {
  return tolerance(dtype) * std::sqrt(static_cast<double>(k) + 1.0);
}

class Matmul : public KernelTest {
 protected:
  void check(const Problem& p, bool with_bias) {
    const Array a = array(p.a), b = array(p.b), bias = array(p.bias);
    Array c = array(p.c);
    const std::vector<double> wide_bias = bias.values();
    const auto expected = reference(p.args, a.values(), b.values(), c.values(),
                                    with_bias ? &wide_bias : nullptr);
    matmul(context, dtype, p.args, a.data(), b.data(), c.data(),
           with_bias ? bias.data() : nullptr);
    expect_close(c.values(), expected, product_tolerance(dtype, p.args.k));
  }
};

// Some are large enough for oneDNN in f32. [160, 70, 400] is the gradient of a
// weight with more outputs than inputs, which it computes in turned order
// unless sums are there. Without inner size the product is zero.
TEST_P(Matmul, EqualsTheDefinitionForAllShapesAndLayouts) {
  const std::int64_t sizes[][4] = {
      {1, 1, 1, 1},      {1, 1, 7, 5},      {1, 3, 1, 9},      {1, 5, 33, 17},
      {1, 12, 32, 16},   {1, 13, 48, 4},    {1, 64, 20, 31},   {1, 37, 70, 300},
      {1, 19, 35, 8},    {1, 19, 35, 300},  {1, 19, 35, 700},  {5, 9, 18, 20},
      {1, 300, 70, 210}, {1, 70, 300, 210}, {1, 160, 70, 400}, {2, 3, 4, 0}};
  for (const auto& [batch, m, n, k] : sizes) {
    for (int layout = 0; layout < 4; ++layout) {
      for (const bool resume : {false, true}) {
        for (const bool with_bias : {false, true}) {
          Problem p = problem(batch, m, n, k, layout & 1, layout & 2);
          p.args.resume = resume;
          SCOPED_TRACE(testing::Message()
                       << m << "x" << n << "x" << k << " layout " << layout
                       << resume << with_bias);
          check(p, with_bias);
        }
      }
    }
  }
}

TEST_P(Matmul, OfNothingDoesNothing) {
  for (int dim = 0; dim < 3; ++dim) {
    MatmulArgs args;
    args.batch = dim == 0 ? 0 : 1;
    args.m = dim == 1 ? 0 : 2;
    args.n = dim == 2 ? 0 : 2;
    args.k = 2;
    matmul(context, dtype, args, nullptr, nullptr, nullptr);
  }
}

TEST_P(Matmul, DoesNotDependOnThreads) {
  for (const std::int64_t batch : {1, 3}) {
    const Problem p = problem(batch, 150, 190, 310, false, true);
    const Array a = array(p.a), b = array(p.b);
    Array one = array(p.c), three = array(p.c);
    context.deterministic = true;
    with_threads(1, [&] {
      matmul(context, dtype, p.args, a.data(), b.data(), one.data());
    });
    with_threads(3, [&] {
      matmul(context, dtype, p.args, a.data(), b.data(), three.data());
    });
    EXPECT_TRUE(one == three);
  }
}

// A row of the product is a function of that row of A and of B only; oneDNN
// gives this up.
TEST_P(Matmul, RowsAloneEqualRowsTogether) {
  context.deterministic = true;
  const std::int64_t m = 61, n = 45, k = 600;
  const Problem p = problem(1, m, n, k, false, false);
  const Array a = array(p.a), b = array(p.b);
  Array whole = array(m * n), part = array(n);
  matmul(context, dtype, p.args, a.data(), b.data(), whole.data());
  const auto together = whole.values();
  for (const std::int64_t row : {0, 11, 12, 60}) {
    MatmulArgs args = p.args;
    args.m = 1;
    matmul(context, dtype, args,
           static_cast<const char*>(a.data()) + row * k * dtype_bytes(dtype),
           b.data(), part.data());
    const auto alone = part.values();
    for (std::int64_t j = 0; j < n; ++j) {
      ASSERT_EQ(alone[j], together[row * n + j]) << row << ", " << j;
    }
  }
}

// A column has the same bits when its neighbours are missing.
TEST_P(Matmul, ColumnsAloneEqualColumnsTogether) {
  context.deterministic = true;
  const std::int64_t m = 25, n = 70, k = 300;
  const Problem p = problem(1, m, n, k, true, true);
  const Array a = array(p.a), b = array(p.b);
  Array whole = array(m * n), part = array(m * 3);
  matmul(context, dtype, p.args, a.data(), b.data(), whole.data());
  const auto together = whole.values();
  MatmulArgs args = p.args;
  args.n = 3;
  matmul(context, dtype, args, a.data(),
         static_cast<const char*>(b.data()) + 31 * k * dtype_bytes(dtype),
         part.data());
  const auto alone = part.values();
  for (std::int64_t r = 0; r < m; ++r) {
    for (std::int64_t j = 0; j < 3; ++j) {
      ASSERT_EQ(alone[r * 3 + j], together[r * n + 31 + j]);
    }
  }
}

// Blocks of k, one after another, are one product: neither the blocks of 384
// inside the kernel nor an addition at the end shows.
TEST_P(Matmul, ResumesTheChainsOfEarlierBlocks) {
  context.deterministic = true;
  if (dtype == DType::kBF16 || dtype == DType::kF16) {
    GTEST_SKIP() << "16 bits are rounded between the blocks";
  }
  Problem p = problem(1, 30, 40, 900, true, false);
  const Array a = array(p.a), b = array(p.b);
  Array whole = array(p.c), blocks = array(p.c);
  matmul(context, dtype, p.args, a.data(), b.data(), whole.data());
  const auto element = static_cast<std::int64_t>(dtype_bytes(dtype));
  for (std::int64_t from = 0; from < 900; from += 450) {
    MatmulArgs block = p.args;
    block.k = 450;
    block.resume = from > 0;
    matmul(context, dtype, block,
           static_cast<const char*>(a.data()) + from * 30 * element,
           static_cast<const char*>(b.data()) + from * 40 * element,
           blocks.data());
  }
  EXPECT_TRUE(blocks == whole);
}

SB_OVER_FLOATING_DTYPES(Matmul);

TEST(MatmulErrors, GeluWantsOneProduct) {
  KernelContext context;
  double x[64] = {};
  const auto refused = [&](const MatmulArgs& args) {
    EXPECT_THROW(matmul_gelu(context, DType::kF64, args, x, x, x, x, x), Error);
    EXPECT_THROW(
        matmul_gelu_backward(context, DType::kF64, args, x, x, x, x, x), Error);
  };
  MatmulArgs args;
  args.m = args.n = args.k = 2;
  args.resume = true;
  refused(args);
  args.resume = false, args.batch = 2;
  refused(args);
}

TEST(MatmulErrors, NameTheArgument) {
  KernelContext context;
  MatmulArgs args;
  args.m = args.n = args.k = 4;
  double x[16] = {};
  EXPECT_THROW(matmul(context, DType::kI64, args, x, x, x), Error);
  args.batch = -1;
  EXPECT_THROW(matmul(context, DType::kF64, args, x, x, x), Error);
}

// A provider that counts: every loan comes back.
struct CountingProvider : ScratchProvider {
  void* acquire(std::size_t bytes) override {
    ++loans;
    peak = std::max(peak, bytes);
    return ::operator new(bytes, std::align_val_t(64));
  }
  void release(void* pointer) override {
    --loans;
    ::operator delete(pointer, std::align_val_t(64));
  }
  int loans = 0;
  std::size_t peak = 0;
};

TEST(KernelContextScratch, ComesFromTheProviderAndGoesBack) {
  CountingProvider provider;
  KernelContext context(&provider);
  const Problem p = problem(1, 200, 100, 300, false, false);
  for (const DType dtype : kFloatingDTypes) {
    const Array a(dtype, p.a), b(dtype, p.b);
    Array c(dtype, p.c);
    matmul(context, dtype, p.args, a.data(), b.data(), c.data());
    EXPECT_EQ(provider.loans, 0);
  }
  EXPECT_GT(provider.peak, 0u);
}

}  // namespace
}  // namespace shardbook::kernels
