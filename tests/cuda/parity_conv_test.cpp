#include "core/kernels/conv.h"

#include "tests/cuda/parity.h"

namespace shardbook::parity {
namespace {

using kernels::ConvShape;
using kernels::tolerance;

/// n, h, w, in, out, kh, kw, stride, padding: single channels and images of
/// three colours, 1x1 kernels, strides, windows that lie half outside.
const ConvShape kConvShapes[] = {
    {1, 5, 5, 1, 1, 3, 3, 1, 1},  {2, 9, 7, 3, 8, 3, 3, 2, 1},
    {2, 6, 6, 8, 16, 1, 1, 1, 0}, {3, 7, 7, 16, 8, 1, 1, 2, 0},
    {1, 11, 9, 3, 5, 7, 5, 2, 3}, {2, 4, 4, 24, 40, 3, 3, 1, 1}};

class ConvParity : public ParityTest {
 protected:
  /// The tolerance of a sum of n products.
  double bound(std::int64_t n) const {
    return tolerance(dtype) * (1 + static_cast<double>(n) / 16);
  }
};

TEST_P(ConvParity, AllPassesEqualTheCpus) {
  for (const ConvShape& s : kConvShapes) {
    const std::int64_t in = s.n * s.h * s.w * s.in;
    const std::int64_t out = s.rows() * s.out, weights = s.out * s.depth();
    Comparison forward(dtype), data(dtype), weight(dtype);
    forward.expect_equal(kernels::conv2d, bound(s.depth()), dtype, s,
                         forward.noise(in, 1), forward.noise(weights, 2),
                         forward.noise(s.out, 3), forward.empty(out), nullptr);
    data.expect_equal(kernels::conv2d_backward_data, bound(s.out * s.kh * s.kw),
                      dtype, s, data.noise(out, 4), data.noise(weights, 2),
                      data.empty(in), nullptr);
    weight.expect_equal(kernels::conv2d_backward_weight, bound(s.rows()), dtype,
                        s, weight.noise(in, 1), weight.noise(out, 4),
                        weight.empty(weights), nullptr);
  }
}

SB_OVER_FLOATING_DTYPES(ConvParity);

}  // namespace
}  // namespace shardbook::parity
