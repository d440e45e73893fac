#include <cmath>
#include <limits>

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
    SCOPED_TRACE(testing::Message() << s.h << " x " << s.w << " x " << s.c);
    const std::int64_t in = s.n * s.h * s.w * s.c;
    const std::int64_t out = s.n * s.out_h() * s.out_w() * s.c;
    Comparison c;
    const Slot x = c.array(dtype, coarse(noise(in, 1)));
    const Slot y = c.empty(dtype, out), taps = c.empty(DType::kI32, out);
    c.expect_equal(kernels::max_pool, 0, dtype, s, x, y, taps);
    // The same windows in the same order: no bit differs.
    Comparison back;
    const Slot dy = back.array(dtype, noise(out, 2));
    const Slot known = back.array(c.cpu_array(taps));
    const Slot dx = back.empty(dtype, in);
    back.expect_equal(kernels::max_pool_backward, 0, dtype, s, dy, known, dx);
  }
}

TEST_P(PoolParity, NanWinsAndMinusInfinityLoses) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double low = -kernels::kInf;
  const PoolShape s{1, 2, 4, 1, 2, 1, 0};
  Comparison c;
  const Slot x = c.array(dtype, {low, low, 1, nan, low, low, 0, 5});
  const Slot y = c.empty(dtype, 3), taps = c.empty(DType::kI32, 3);
  c.expect_equal(kernels::max_pool, 0, dtype, s, x, y, taps);
}

TEST_P(PoolParity, AveragesEqualTheCpus) {
  struct Images {
    std::int64_t n, pixels, c;
  };
  for (const auto& [n, pixels, channels] :
       {Images{0, 4, 3}, {1, 1, 1}, {3, 49, 7}, {2, 49, 64}, {5, 6, 2000}}) {
    Comparison c;
    const Slot x = c.array(dtype, noise(n * pixels * channels, 1));
    const Slot y = c.empty(dtype, n * channels);
    c.expect_equal(kernels::average_pixels, tolerance(dtype), dtype, n, pixels,
                   channels, x, y);
    Comparison back;
    const Slot dy = back.array(dtype, noise(n * channels, 2));
    const Slot dx = back.empty(dtype, n * pixels * channels);
    back.expect_equal(kernels::average_pixels_backward, 0, dtype, n, pixels,
                      channels, dy, dx);
  }
}

SB_PARITY_OVER_FLOATING_DTYPES(PoolParity);

}  // namespace
}  // namespace shardbook::parity
