#include <cmath>

#include "core/kernels/pool.h"
#include "tests/cuda/parity.h"

namespace shardbook::parity {
namespace {

using kernels::noise;
using kernels::PoolShape;
using kernels::tolerance;

/// n, h, w, c, size, stride, padding: windows that overlap, that leave gaps,
/// that lie half outside; channels in whole vectors and not.
const PoolShape kPoolShapes[] = {
    {0, 4, 4, 3, 2, 2, 0},  {1, 1, 1, 1, 1, 1, 0},   {2, 4, 4, 3, 2, 1, 0},
    {2, 5, 7, 3, 3, 2, 1},  {1, 8, 6, 5, 2, 3, 0},   {3, 9, 9, 16, 3, 2, 1},
    {2, 7, 5, 24, 3, 1, 1}, {1, 20, 21, 40, 3, 2, 1}};

/// Steps of a quarter, so that windows hold equals.
std::vector<double> coarse(std::vector<double> values) {
  for (double& v : values) v = std::round(4 * v) / 4;
  return values;
}

class PoolParity : public ParityTest {};

TEST_P(PoolParity, MaxPoolAndItsGradientEqualTheCpus) {
  for (const PoolShape& s : kPoolShapes) {
    const std::int64_t in = s.n * s.h * s.w * s.c;
    const std::int64_t out = s.n * s.out_h() * s.out_w() * s.c;
    Comparison c(dtype);
    const Slot taps = c.empty(DType::kI32, out);
    c.expect_equal(kernels::max_pool, 0, dtype, s,
                   c.array(coarse(noise(in, 1))), c.empty(out), taps);
    // The same windows in the same order: no bit differs.
    Comparison back(dtype);
    back.expect_equal(kernels::max_pool_backward, 0, dtype, s,
                      back.noise(out, 2), back.array(c.cpu_array(taps)),
                      back.empty(in));
  }
}

TEST_P(PoolParity, NanWinsAndMinusInfinityLoses) {
  const double nan = kernels::kNan, low = -kernels::kInf;
  const PoolShape s{1, 2, 4, 1, 2, 1, 0};
  Comparison c(dtype);
  c.expect_equal(kernels::max_pool, 0, dtype, s,
                 c.array({low, low, 1, nan, low, low, 0, 5}), c.empty(3),
                 c.empty(DType::kI32, 3));
}

TEST_P(PoolParity, AveragesEqualTheCpus) {
  struct Images {
    std::int64_t n, pixels, c;
  };
  for (const auto& [n, pixels, channels] :
       {Images{0, 4, 3}, {1, 1, 1}, {3, 49, 7}, {2, 49, 64}, {5, 6, 2000}}) {
    Comparison c(dtype), back(dtype);
    c.expect_equal(kernels::average_pixels, tolerance(dtype), dtype, n, pixels,
                   channels, c.noise(n * pixels * channels, 1),
                   c.empty(n * channels));
    back.expect_equal(kernels::average_pixels_backward, 0, dtype, n, pixels,
                      channels, back.noise(n * channels, 2),
                      back.empty(n * pixels * channels));
  }
}

SB_OVER_FLOATING_DTYPES(PoolParity);

}  // namespace
}  // namespace shardbook::parity
