#include <algorithm>
#include <cmath>

#include "core/kernels/elementwise.h"
#include "tests/cuda/parity.h"

namespace shardbook::parity {
namespace {

using kernels::BinaryOp;
using kernels::Dims;
using kernels::noise;
using kernels::shape_size;
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
      Comparison c(dtype);
      const Slot a = c.array(numbers(n, 1));
      const Slot b = c.array(numbers(n, 2));
      c.expect_equal(kernels::binary, 0, op, dtype, Dims{n}, a, Dims{n}, b,
                     c.empty(n));
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
      Comparison c(dtype);
      const Slot a = c.array(numbers(shape_size(a_shape), 5));
      const Slot b = c.array(numbers(shape_size(b_shape), 6));
      std::vector<Slot> results = {c.empty(shape_size(shape))};
      if (shape == a_shape) results.push_back(a);
      for (const Slot out : results) {
        c.expect_equal(kernels::binary, 0, op, dtype, a_shape, a, b_shape, b,
                       out);
      }
    }
  }
}

// Every pointer one element behind an aligned address.
TEST_P(ElementwiseParity, UnalignedArraysAreBitEqual) {
  constexpr std::int64_t kRows = 9, kCols = 64, n = kRows * kCols;
  Comparison c(dtype);
  const Slot x = c.array(numbers(n + 1, 1)), y = c.array(numbers(kCols + 1, 2));
  const Slot z = c.empty(n + 1);
  c.expect_equal_in(0, [&](const auto& on) {
    const Pointer a = on.from(x, 1), b = on.from(y, 1), out = on.from(z, 1);
    kernels::binary(on.context, BinaryOp::kMul, dtype, {kRows, kCols}, a,
                    {kCols}, b, out);
    kernels::binary(on.context, BinaryOp::kAdd, dtype, {n}, out, {n}, a, out);
    kernels::scale(on.context, dtype, n, 3, out, out);
  });
}

TEST_P(ElementwiseParity, FillScaleShiftAndAxpy) {
  for (const std::int64_t n : lengths()) {
    for (const double value : {0.0, -3.0, 7.25, 1e5}) {
      Comparison c(dtype);
      const Slot x = c.array(numbers(n, 1));
      const Slot y = c.array(numbers(n, 2));
      c.expect_equal(kernels::fill, 0, dtype, n, c.empty(n), value);
      c.expect_equal(kernels::scale, 0, dtype, n, value, x, c.empty(n));
      c.expect_equal(kernels::add_scalar, 0, dtype, n, value, x, c.empty(n));
      // One side may round the product before it adds y.
      c.expect_equal(kernels::axpy,
                     tolerance(dtype) * std::max(1.0, std::fabs(value)), dtype,
                     n, value, x, y);
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
      Comparison c(dtype);
      c.expect_equal(kernels::cast, 0, dtype, c.array(values), to,
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
      Comparison c(dtype);
      const Slot x = c.array(values);
      const Slot dy = c.noise(n, 5);
      c.expect_equal(kernels::unary, tolerance(dtype), op, dtype, n, x,
                     c.empty(n));
      // The slope of a rounded square root: as exact as the input.
      for (const Slot dx : {c.empty(n), dy}) {
        c.expect_equal(kernels::unary_backward, 2 * tolerance(dtype), op, dtype,
                       n, x, dy, dx);
      }
    }
  }
}

TEST_P(UnaryParity, SpecialValuesPassThrough) {
  const double inf = kernels::kInf, nan = std::nan("");
  for (const UnaryOp op : kUnaryOps) {
    Comparison c(dtype);
    const Slot x = c.array({inf, -inf, nan, 0.0, -0.0, -80, 80});
    c.expect_equal(kernels::unary, tolerance(dtype), op, dtype, 7, x,
                   c.empty(7));
  }
}

SB_PARITY_OVER_FLOATING_DTYPES(UnaryParity);

}  // namespace
}  // namespace shardbook::parity
