#include <algorithm>
#include <cmath>
#include <numeric>

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

// Numbers that are integers too, none of them 0.
std::vector<double> numbers(std::int64_t n, std::uint64_t seed) {
  std::vector<double> values = noise(n, seed);
  for (double& x : values) x = 90 * x + (x < 0 ? -1 : 1);
  return values;
}

class ElementwiseParity : public ParityTest {};

TEST_P(ElementwiseParity, BinaryOnEqualShapesIsBitEqual) {
  for (const std::int64_t n : lengths()) {
    for (const BinaryOp op : kernels::kBinaryOps) {
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
  for (const auto& [a_shape, b_shape] : kernels::kBroadcasts) {
    const Dims shape = kernels::broadcast_shape(a_shape, b_shape);
    for (const BinaryOp op : kernels::kBinaryOps) {
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
  for (const DType to : kAllDTypes) {
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

SB_OVER_ALL_DTYPES(ElementwiseParity);

TEST(CastParity, Every16BitNumberGoesToF32AndBack) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    constexpr std::int64_t n = 1 << 16;
    Array all(dtype, n);
    auto* const bits = static_cast<std::uint16_t*>(all.data());
    std::iota(bits, bits + n, 0);
    Comparison c;
    const Slot narrow = c.array(all), wide = c.empty(DType::kF32, n);
    c.expect_equal(kernels::cast, 0, dtype, narrow, DType::kF32, wide, n);
    c.expect_equal(kernels::cast, 0, DType::kF32, wide, dtype, narrow, n);
  }
}

// Half way between two numbers, and beside that; the ends of f16.
TEST(CastParity, RoundsToNearestEven) {
  const std::vector<double> values = {1 + 0x1p-11,     1 + 0x1p-11 + 0x1p-20,
                                      1 + 3 * 0x1p-11, 65519,
                                      65520,           0x1p-24,
                                      0x1p-25,         0x1.8p-25,
                                      1 + 0x1p-8,      1 + 3 * 0x1p-8};
  const auto n = static_cast<std::int64_t>(values.size());
  for (const DType to : {DType::kBF16, DType::kF16}) {
    Comparison c;
    c.expect_equal(kernels::cast, 0, DType::kF32, c.array(DType::kF32, values),
                   to, c.empty(to, n), n);
  }
}

class UnaryParity : public ParityTest {};

TEST_P(UnaryParity, ForwardAndBackward) {
  for (const std::int64_t n : lengths()) {
    for (const UnaryOp op : kernels::kUnaryOps) {
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
  for (const UnaryOp op : kernels::kUnaryOps) {
    Comparison c(dtype);
    const Slot x = c.array({inf, -inf, nan, 0.0, -0.0, -80, 80});
    c.expect_equal(kernels::unary, tolerance(dtype), op, dtype, 7, x,
                   c.empty(7));
  }
}

SB_OVER_FLOATING_DTYPES(UnaryParity);

}  // namespace
}  // namespace shardbook::parity
