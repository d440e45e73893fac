// SwiGLU: values, the order of its roundings, and what it keeps.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "tests/core/support.h"

namespace shardbook {
namespace {

double silu(double x) { return x / (1 + std::exp(-x)); }

TEST(Swiglu, EqualsItsDefinition) {
  for (const std::int64_t n : {1, 3, 16, 37}) {
    const Tensor x = noise({2, 3, 2 * n}, 1, -5, 5);
    const Tensor y = swiglu(x);
    EXPECT_EQ(y.shape(), (Shape{2, 3, n}));
    const std::vector<double> in = values(x);
    std::vector<double> expected;
    for (std::int64_t row = 0; row < 6; ++row) {
      for (std::int64_t i = 0; i < n; ++i) {
        const std::size_t gate = row * 2 * n + i;
        expected.push_back(silu(in[gate]) * in[gate + n]);
      }
    }
    expect_close(values(y), expected, 1e-14);
  }
}

/// silu(gate) from a single operation of the book, in the dtype.
Tensor silu_of(const Tensor& gate) {
  return to_dtype(
      mul(to_dtype(gate, DType::kF32), sigmoid(to_dtype(gate, DType::kF32))),
      gate.dtype());
}

TEST(Swiglu, RoundsLikeSiluAndThenAProduct) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    const Tensor x = leaf({5, 128}, 1, -6, 6, {dtype, Device()});
    const Tensor gate = slice(x.detach(), 1, 0, 64),
                 up = slice(x.detach(), 1, 64, 128);
    const Tensor y = swiglu(x);
    EXPECT_TRUE(bitwise_equal(y.detach(), mul(silu_of(gate), up)));
    // One rounding is another result
    const Tensor once =
        to_dtype(swiglu(to_dtype(x.detach(), DType::kF32)), dtype);
    EXPECT_FALSE(bitwise_equal(y.detach(), once));

    const Tensor dy = noise({5, 64}, 2, -1, 1, {dtype, Device()});
    autograd::backward({y}, {dy});
    EXPECT_TRUE(
        bitwise_equal(slice(x.grad(), 1, 64, 128), mul(dy, silu_of(gate))));
    // The gradient of silu(gate) is rounded before silu' multiplies it
    const auto wide = [](const Tensor& x) { return to_dtype(x, DType::kF64); };
    const Tensor s = sigmoid(wide(gate));
    const Tensor slope =
        mul(s, add_scalar(mul(wide(gate), add_scalar(neg(s), 1)), 1));
    const auto differs_from = [&](const Tensor& dsilu) {
      const std::vector<double> expected =
          values(to_dtype(mul(dsilu, slope), dtype));
      const std::vector<double> found = values(slice(x.grad(), 1, 0, 64));
      int different = 0;
      for (std::size_t i = 0; i < found.size(); ++i) {
        different += found[i] != expected[i];
      }
      return different;
    };
    // Where f64 is all but between two numbers, f32 may choose the other one
    EXPECT_LE(differs_from(wide(mul(dy, up))), 2);
    EXPECT_GT(differs_from(mul(wide(dy), wide(up))), 20);
  }
}

TEST(Swiglu, LargeGatesDoNotOverflow) {
  const Tensor x = leaf_of({-800, 800, 3, 3}, {1, 4});
  const Tensor narrow = to_dtype(x.detach(), DType::kF32).set_requires_grad();
  for (const Tensor& each : {x, narrow}) {
    const Tensor y = swiglu(each);
    EXPECT_EQ(values(y), (std::vector<double>{0, 2400}));
    sum(y).backward();
    EXPECT_EQ(values(each.grad()), (std::vector<double>{0, 3, 0, 800}));
  }
}

TEST(Swiglu, KeepsItsInputAlone) {
  const OwnDevice own;
  const Tensor x = leaf({3, 8}, 1, -1, 1, kOfBF16);
  const Tensor y = swiglu(x);
  EXPECT_EQ(own.device.memory().current_total, x.bytes() + y.bytes());
}

TEST(Swiglu, RefusesAnOddWidth) {
  expect_error([] { swiglu(noise({2, 5})); }, {"5 columns", "gate"});
  expect_error([] { swiglu(noise({})); }, {"swiglu", "scalar"});
}

}  // namespace
}  // namespace shardbook
