#include <cmath>
#include <cstring>
#include <limits>

#include "core/check.h"
#include "core/kernels/elementwise.h"
#include "core/kernels/reduce.h"
#include "tests/cuda/parity.h"

namespace shardbook::parity {
namespace {

using kernels::BinaryOp;
using kernels::Dims;
using kernels::noise;
using kernels::tolerance;
using kernels::UnaryOp;

constexpr BinaryOp kBinaryOps[] = {BinaryOp::kAdd, BinaryOp::kSub,
                                   BinaryOp::kMul, BinaryOp::kDiv};
constexpr UnaryOp kUnaryOps[] = {
    UnaryOp::kNeg,     UnaryOp::kAbs,  UnaryOp::kRelu,    UnaryOp::kGeluTanh,
    UnaryOp::kGeluErf, UnaryOp::kTanh, UnaryOp::kSigmoid, UnaryOp::kSquare,
    UnaryOp::kSqrt,    UnaryOp::kExp,  UnaryOp::kLog};

// Numbers that are integers too, none of them 0.
std::vector<double> numbers(std::int64_t n, std::uint64_t seed) {
  std::vector<double> values = noise(n, seed);
  for (double& x : values) x = 90 * x + (x < 0 ? -1 : 1);
  return values;
}

class ElementwiseParity : public ParityTest {};

TEST_P(ElementwiseParity, BinaryOnEqualShapesIsBitEqual) {
  for (const std::int64_t n : lengths()) {
    for (const BinaryOp op : kBinaryOps) {
      Comparison c;
      const Slot a = c.array(dtype, numbers(n, 1));
      const Slot b = c.array(dtype, numbers(n, 2));
      c.expect_equal(kernels::binary_same_shape, 0, op, dtype, n, a, b,
                     c.empty(dtype, n));
      c.expect_equal(kernels::binary, 0, op, dtype, Dims{n}, a, Dims{n}, b, b);
    }
  }
}

TEST_P(ElementwiseParity, BinaryBroadcasts) {
  const std::pair<Dims, Dims> shapes[] = {
      {{5, 37}, {37}},
      {{37}, {5, 37}},
      {{5, 37}, {5, 1}},
      {{5, 1}, {1, 37}},
      {{}, {4, 20}},
      {{4, 20}, {1}},
      {{70, 64}, {64}},
      {{64}, {70, 64}},
      {{70, 64}, {70, 1}},
      {{2, 3, 4, 5}, {3, 1, 5}},
      {{2, 1, 4, 1}, {3, 1, 5}},
      {{2, 3, 1, 16}, {1, 4, 16}},
      {{1}, {1}},
      {{}, {}},
      {{3, 0, 2}, {1, 2}},
      {{2, 3, 1, 5, 6}, {2, 1, 4, 5, 1}},
      {{2, 1, 2, 1, 2, 1, 2, 1}, {1, 3, 1, 2, 1, 3, 1, 2}}};
  for (const auto& [a_shape, b_shape] : shapes) {
    const Dims shape = kernels::broadcast_shape(a_shape, b_shape);
    for (const BinaryOp op : kBinaryOps) {
      Comparison c;
      const Slot a = c.array(dtype, numbers(elements_of(a_shape), 5));
      const Slot b = c.array(dtype, numbers(elements_of(b_shape), 6));
      c.expect_equal(kernels::binary, 0, op, dtype, a_shape, a, b_shape, b,
                     c.empty(dtype, elements_of(shape)));
      if (shape == a_shape) {
        c.expect_equal(kernels::binary, 0, op, dtype, a_shape, a, b_shape, b,
                       a);
      }
    }
  }
}

// Every pointer one element behind an aligned address.
TEST_P(ElementwiseParity, UnalignedArraysAreBitEqual) {
  const std::int64_t bytes = static_cast<std::int64_t>(dtype_bytes(dtype));
  const auto shifted = [&](KernelContext& context, std::int64_t rows,
                           std::int64_t cols, const char* a, const char* b,
                           char* out) {
    kernels::binary(context, BinaryOp::kMul, dtype, {rows, cols}, a + bytes,
                    {cols}, b + bytes, out + bytes);
    kernels::binary_same_shape(context, BinaryOp::kAdd, dtype, rows * cols,
                               out + bytes, a + bytes, out + bytes);
    kernels::scale(context, dtype, rows * cols, 3, out + bytes, out + bytes);
  };
  Comparison c;
  const std::int64_t rows = 9, cols = 64;
  c.expect_equal(
      shifted, 0, rows, cols, c.array(dtype, numbers(rows * cols + 1, 1)),
      c.array(dtype, numbers(cols + 1, 2)), c.empty(dtype, rows * cols + 1));
}

TEST_P(ElementwiseParity, FillScaleShiftAndAxpy) {
  for (const std::int64_t n : lengths()) {
    for (const double value : {0.0, -3.0, 7.25, 1e5}) {
      Comparison c;
      const Slot x = c.array(dtype, numbers(n, 1));
      const Slot y = c.array(dtype, numbers(n, 2));
      c.expect_equal(kernels::fill, 0, dtype, n, c.empty(dtype, n), value);
      c.expect_equal(kernels::scale, 0, dtype, n, value, x, c.empty(dtype, n));
      c.expect_equal(kernels::add_scalar, 0, dtype, n, value, x,
                     c.empty(dtype, n));
      c.expect_equal(kernels::axpy, tolerance(dtype), dtype, n, value, x, y);
      c.expect_equal(kernels::scale, 0, dtype, n, value, x, x);
    }
  }
}

TEST_P(ElementwiseParity, CastToEveryDtypeRoundsOnce) {
  for (const DType to : all_dtypes()) {
    for (const std::int64_t n : lengths()) {
      std::vector<double> values = numbers(n, 3);
      // Just above the middle of two numbers of f16 and of bf16
      if (n > 4) values[1] = 1 + 0x1p-11 + 0x1p-40, values[2] = -1 - 0x1p-11;
      if (n > 4) values[3] = 1 + 0x1p-8 + 0x1p-40, values[4] = 1e-7;
      Comparison c;
      c.expect_equal(kernels::cast, 0, dtype, c.array(dtype, values), to,
                     c.empty(to, n), n);
    }
  }
}

SB_PARITY_OVER_ALL_DTYPES(ElementwiseParity);

class UnaryParity : public ParityTest {};

TEST_P(UnaryParity, ForwardAndBackward) {
  for (const std::int64_t n : lengths()) {
    for (const UnaryOp op : kUnaryOps) {
      const bool positive = op == UnaryOp::kSqrt || op == UnaryOp::kLog;
      std::vector<double> values = noise(n, 4);
      for (double& x : values) x = positive ? std::fabs(x) + 0.1 : 4 * x;
      if (n > 2) values[2] = positive ? 1 : 0;
      Comparison c;
      const Slot x = c.array(dtype, values);
      const Slot dy = c.array(dtype, noise(n, 5));
      c.expect_equal(kernels::unary, tolerance(dtype), op, dtype, n, x,
                     c.empty(dtype, n));
      // The slope of a rounded square root: as exact as the input.
      c.expect_equal(kernels::unary_backward, 2 * tolerance(dtype), op, dtype,
                     n, x, dy, c.empty(dtype, n));
      c.expect_equal(kernels::unary_backward, 2 * tolerance(dtype), op, dtype,
                     n, x, dy, dy);
    }
  }
}

TEST_P(UnaryParity, SpecialValuesPassThrough) {
  const double inf = kernels::kInf, nan = std::nan("");
  for (const UnaryOp op : kUnaryOps) {
    Comparison c;
    const Slot x = c.array(dtype, {inf, -inf, nan, 0.0, -0.0, -80, 80});
    c.expect_equal(kernels::unary, tolerance(dtype), op, dtype, 7, x,
                   c.empty(dtype, 7));
  }
}

SB_PARITY_OVER_FLOATING_DTYPES(UnaryParity);

TEST(ElementwiseParityErrors, ADivisionByZeroIsReported) {
  for (const DType dtype : {DType::kI64, DType::kI32}) {
    CudaContext context;
    const kernels::Array ones(dtype, {1, 1, 1}), zeros(dtype, {1, 0, 1});
    const std::size_t bytes = 3 * dtype_bytes(dtype);
    DeviceArray a(bytes), b(bytes);
    a.write(context, ones.data());
    b.write(context, zeros.data());
    kernels::binary_same_shape(context.kernels(), BinaryOp::kDiv, dtype, 3,
                               a.data(), b.data(), a.data());
    // The next kernel with a result brings it to light.
    EXPECT_THROW(kernels::sum_all(context.kernels(), dtype, 3, b.data()),
                 Error);
    EXPECT_EQ(kernels::sum_all(context.kernels(), dtype, 3, b.data()), 2)
        << "an error is thrown once";
  }
}

TEST(ElementwiseParityErrors, ShapesAndDtypesAreRefused) {
  CudaContext context;
  double x[4] = {};
  EXPECT_THROW(kernels::binary(context.kernels(), BinaryOp::kAdd, DType::kF64,
                               {3}, x, {2}, x, x),
               Error);
  EXPECT_THROW(
      kernels::unary(context.kernels(), UnaryOp::kExp, DType::kI64, 1, x, x),
      Error);
}

}  // namespace
}  // namespace shardbook::parity
