#include "core/kernels/random.h"
#include "tests/cuda/parity.h"

namespace shardbook::parity {
namespace {

using kernels::GlobalView;
using kernels::kKey;
using kernels::noise;
using kernels::shape_size;
using kernels::tolerance;
using kernels::whole_view;

std::vector<GlobalView> views() {
  std::vector<GlobalView> all = kernels::parts_of_a_tensor();
  // Where 32 bits of the counter end
  const std::int64_t large = std::int64_t{1} << 40;
  all.push_back({{200}, {large}, {(std::int64_t{1} << 34) - 30}, {}});
  all.push_back({{}, {}, {}, {}});
  for (const std::int64_t n : lengths()) all.push_back(whole_view({n}));
  return all;
}

class RandomParity : public ParityTest {};

// With fused multiplication and addition on the CPU, as on CUDA; without, the
// last bit may differ.
TEST_P(RandomParity, UniformNumbersAreBitEqual) {
#ifdef __FMA__
  const double tolerance = 0;
#else
  const double tolerance = kernels::tolerance(dtype);
#endif
  for (const GlobalView& view : views()) {
    Comparison c(dtype);
    c.expect_equal(kernels::fill_uniform, tolerance, dtype, view, kKey, -0.3,
                   0.7, c.empty(shape_size(view.shape)));
    c.expect_equal(kernels::fill_uniform, 0, dtype, view, kKey, 0.0, 1.0,
                   c.empty(shape_size(view.shape)));
  }
}

TEST_P(RandomParity, NormalNumbersAgreeUpToTheLastBit) {
  for (const GlobalView& view : views()) {
    Comparison c(dtype);
    c.expect_equal(kernels::fill_normal, tolerance(dtype), dtype, view, kKey,
                   0.5, 2.0, c.empty(shape_size(view.shape)));
  }
}

TEST_P(RandomParity, DropoutIsBitEqual) {
  for (const GlobalView& view : views()) {
    for (const double p : {0.0, 0.25, 0.9}) {
      Comparison c(dtype);
      const Slot x = c.noise(shape_size(view.shape), 1);
      c.expect_equal(kernels::dropout, 0, dtype, view, kKey, p, x,
                     c.empty(shape_size(view.shape)));
      c.expect_equal(kernels::dropout, 0, dtype, view, kKey, p, x, x);
    }
  }
}

SB_OVER_FLOATING_DTYPES(RandomParity);

}  // namespace
}  // namespace shardbook::parity
