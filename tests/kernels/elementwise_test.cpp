#include "core/kernels/elementwise.h"

#include <limits>
#include <map>

#include "core/check.h"
#include "tests/kernels/support.h"

namespace shardbook::kernels {
namespace {

class Elementwise : public KernelTest {};

Values apply(BinaryOp op, const Values& a, const Values& b) {
  switch (op) {
    case BinaryOp::kAdd:
      return a + b;
    case BinaryOp::kSub:
      return a - b;
    case BinaryOp::kMul:
      return a * b;
    default:
      return a / b;
  }
}

TEST_P(Elementwise, BinaryBroadcastsAsNumpyDoes) {
  for (const auto& [a_shape, b_shape] : kBroadcasts) {
    const Array a = array(noise(shape_size(a_shape), 5));
    std::vector<double> divisor = noise(shape_size(b_shape), 6);
    for (double& x : divisor) x += x < 0 ? -0.5 : 0.5;
    const Array b = array(divisor);
    for (const BinaryOp op : kBinaryOps) {
      const Values expected = apply(op, a.as(a_shape), b.as(b_shape));
      Array out = array(static_cast<std::int64_t>(expected.size()));
      binary(context, op, dtype, a_shape, a.data(), b_shape, b.data(),
             out.data());
      expect_close(out, expected, tolerance(dtype));
    }
  }
}

TEST_P(Elementwise, ScaleShiftAndAxpy) {
  for (const std::int64_t n : {0, 1, 15, 16, 100, 40000}) {
    const Array x = array(noise(n, 1));
    Array y = array(noise(n, 2)), z = array(n);
    const Values in = x.as({n}), expected = y.as({n}) + 0.25 * in;
    axpy(context, dtype, n, 0.25, x.data(), y.data());
    expect_close(y, expected, tolerance(dtype));
    scale(context, dtype, n, -3.0, x.data(), z.data());
    expect_close(z, -3.0 * in, tolerance(dtype));
    add_scalar(context, dtype, n, 2.0, x.data(), z.data());
    expect_close(z, in + 2.0, tolerance(dtype));
  }
}

double forward(UnaryOp op, double x) {
  const double u = std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x);
  switch (op) {
    case UnaryOp::kNeg:
      return -x;
    case UnaryOp::kAbs:
      return std::fabs(x);
    case UnaryOp::kRelu:
      return x > 0 ? x : 0;
    case UnaryOp::kGeluTanh:
      return x / (1.0 + std::exp(-2.0 * u));
    case UnaryOp::kGeluErf:
      return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
    case UnaryOp::kTanh:
      return std::tanh(x);
    case UnaryOp::kSigmoid:
      return 1.0 / (1.0 + std::exp(-x));
    case UnaryOp::kSquare:
      return x * x;
    case UnaryOp::kSqrt:
      return std::sqrt(x);
    case UnaryOp::kExp:
      return std::exp(x);
    case UnaryOp::kLog:
      return std::log(x);
  }
  return 0;
}

TEST_P(Elementwise, UnaryEqualsTheLibraryFunction) {
  for (const UnaryOp op : kUnaryOps) {
    SCOPED_TRACE(static_cast<int>(op));
    std::vector<double> in = noise(1000, 9);
    for (double& x : in) x *= 9.0;
    if (op == UnaryOp::kSqrt || op == UnaryOp::kLog) {
      for (double& x : in) x = std::fabs(x) + 0.01;
    }
    const Array x = array(in);
    Array y = array(1000);
    unary(context, op, dtype, 1000, x.data(), y.data());
    std::vector<double> expected = x.values();
    for (double& v : expected) v = forward(op, v);
    expect_close(y.values(), expected, tolerance(dtype));
    // In place
    Array z = x;
    unary(context, op, dtype, 1000, z.data(), z.data());
    EXPECT_TRUE(z == y);
  }
}

SB_OVER_FLOATING_DTYPES(Elementwise);

TEST(ElementwiseF32, FunctionsAreAccurateRelatively) {
  KernelContext context;
  const std::map<UnaryOp, double> bounds = {
      {UnaryOp::kExp, 2.5e-7},    {UnaryOp::kTanh, 3e-7},
      {UnaryOp::kSigmoid, 3e-7},  {UnaryOp::kLog, 2.5e-7},
      {UnaryOp::kGeluTanh, 2e-6}, {UnaryOp::kGeluErf, 2e-6}};
  for (const auto& [op, bound] : bounds) {
    SCOPED_TRACE(static_cast<int>(op));
    std::vector<float> x, y;
    for (double v = 1e-6; v < 8.0; v *= 1.003) {
      x.push_back(static_cast<float>(v));
      if (op != UnaryOp::kLog) {
        // Far out the slope of gelu's exponent magnifies the rounding of x.
        const bool is_gelu =
            op == UnaryOp::kGeluTanh || op == UnaryOp::kGeluErf;
        if (!is_gelu || v < 3.0) {
          x.push_back(static_cast<float>(-v));
        }
      }
    }
    y.resize(x.size());
    unary(context, op, DType::kF32, x.size(), x.data(), y.data());
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double expected = forward(op, x[i]);
      ASSERT_NEAR(y[i], expected, bound * std::fabs(expected)) << x[i];
    }
  }
}

TEST(ElementwiseF32, SpecialValuesPassThrough) {
  KernelContext context;
  const auto run = [&](UnaryOp op, double x) {
    const float in = static_cast<float>(x);
    float out = 0;
    unary(context, op, DType::kF32, 1, &in, &out);
    return out;
  };
  EXPECT_EQ(run(UnaryOp::kExp, -kInf), 0.0f);
  EXPECT_EQ(run(UnaryOp::kExp, -200.0), 0.0f);
  EXPECT_EQ(run(UnaryOp::kExp, 200.0), static_cast<float>(kInf));
  EXPECT_EQ(run(UnaryOp::kExp, kInf), static_cast<float>(kInf));
  const double near_end = 88.7f;
  EXPECT_NEAR(run(UnaryOp::kExp, near_end) / std::exp(near_end), 1.0, 1e-6);
  EXPECT_NEAR(run(UnaryOp::kExp, -87.0) / std::exp(-87.0), 1.0, 1e-6);
  EXPECT_EQ(run(UnaryOp::kTanh, 100.0), 1.0f);
  EXPECT_EQ(run(UnaryOp::kTanh, -kInf), -1.0f);
  EXPECT_EQ(run(UnaryOp::kGeluTanh, 50.0), 50.0f);
  EXPECT_EQ(run(UnaryOp::kGeluTanh, -50.0), 0.0f);
  EXPECT_EQ(run(UnaryOp::kGeluErf, 50.0), 50.0f);
  EXPECT_EQ(run(UnaryOp::kGeluErf, -50.0), 0.0f);
  for (const UnaryOp op : kUnaryOps) {
    EXPECT_TRUE(std::isnan(run(op, kNan))) << static_cast<int>(op);
  }
}

// Round to nearest even, by comparing the two neighbours.
TEST(Cast, RoundsToNearestEven) {
  KernelContext context;
  // 1 + 2^-8 lies halfway between two bf16 numbers; even is 1.
  const std::vector<double> in = {1.0 + 0x1p-8, 1.0 + 3 * 0x1p-8,
                                  1.0 + 0x1p-8 + 0x1p-30, -1.0 - 0x1p-8};
  EXPECT_EQ(
      Array(DType::kBF16, in).values(),
      (std::vector<double>{1.0, 1.0 + 4 * 0x1p-8, 1.0 + 2 * 0x1p-8, -1.0}));
  const std::vector<double> half = {1.0 + 0x1p-11,
                                    1.0 + 3 * 0x1p-11,
                                    1.0 + 0x1p-11 + 0x1p-40,
                                    0x1p-24,
                                    0x1p-25,
                                    0x1p-25 * 1.001,
                                    65519.0,
                                    65520.0};
  EXPECT_EQ(Array(DType::kF16, half).values(),
            (std::vector<double>{1.0, 1.0 + 4 * 0x1p-11, 1.0 + 2 * 0x1p-11,
                                 0x1p-24, 0.0, 0x1p-24, 65504.0, kInf}));
}

TEST(Cast, KeepsEvery16BitNumberThroughF32) {
  KernelContext context;
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    std::vector<std::uint16_t> bits(65536), back(65536);
    for (int i = 0; i < 65536; ++i) bits[i] = static_cast<std::uint16_t>(i);
    std::vector<float> wide(65536);
    cast(context, dtype, bits.data(), DType::kF32, wide.data(), 65536);
    cast(context, DType::kF32, wide.data(), dtype, back.data(), 65536);
    for (int i = 0; i < 65536; ++i) {
      if (std::isnan(wide[i])) {
        float again;
        cast(context, dtype, &back[i], DType::kF32, &again, 1);
        ASSERT_TRUE(std::isnan(again)) << i;
      } else {
        ASSERT_EQ(back[i], bits[i]) << dtype_name(dtype);
      }
    }
  }
}

TEST(Integers, AddMultiplyAndFill) {
  KernelContext context;
  std::vector<std::int64_t> a = {1, -2, 3}, b = {4, 5, -6}, out(3);
  binary(context, BinaryOp::kMul, DType::kI64, {3}, a.data(), {3}, b.data(),
         out.data());
  EXPECT_EQ(out, (std::vector<std::int64_t>{4, -10, -18}));
  binary(context, BinaryOp::kDiv, DType::kI64, {3}, b.data(), {3}, a.data(),
         out.data());
  EXPECT_EQ(out, (std::vector<std::int64_t>{4, -2, -2}));
  fill(context, DType::kI64, 3, out.data(), 7);
  EXPECT_EQ(out, (std::vector<std::int64_t>{7, 7, 7}));
  axpy(context, DType::kI64, 3, 2.0, a.data(), out.data());
  EXPECT_EQ(out, (std::vector<std::int64_t>{9, 3, 13}));
  a[1] = 0;
  EXPECT_THROW(binary(context, BinaryOp::kDiv, DType::kI64, {3}, b.data(), {3},
                      a.data(), out.data()),
               Error);
}

}  // namespace
}  // namespace shardbook::kernels
