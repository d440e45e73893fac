#include "core/kernels/random.h"
#include "tests/cuda/parity.h"

namespace shardbook::parity {
namespace {

using kernels::Dims;
using kernels::GlobalView;
using kernels::noise;
using kernels::shape_size;
using kernels::tolerance;
using kernels::whole_view;

constexpr kernels::RandomKey kKey{0x123456789abcdef0ull, 77};

std::vector<GlobalView> views() {
  const Dims global = {6, 10, 14};
  const std::int64_t large = std::int64_t{1} << 40;
  std::vector<GlobalView> all = {
      {{6, 10, 14}, global, {}, {}},
      {{3, 10, 14}, global, {3, 0, 0}, {}},
      {{6, 5, 14}, global, {0, 5, 0}, {}},
      {{6, 10, 7}, global, {0, 0, 7}, {}},
      {{6, 10, 8}, global, {0, 0, 4}, {}},
      {{2, 3, 5}, global, {1, 2, 3}, {}},
      {{6, 10, 7}, global, {0, 0, 1}, {1, 1, 2}},
      {{2, 5, 14}, global, {1, 0, 0}, {3, 2, 1}},
      {{3, 10, 14}, global, {1, 0, 0}, {2, 1, 1}},
      {{1, 1, 1}, global, {5, 9, 13}, {}},
      {{0, 10, 14}, global, {0, 0, 0}, {}},
      // Where 32 bits of the counter end
      {{200}, {large}, {(std::int64_t{1} << 34) - 30}, {}},
      {{}, {}, {}, {}}};
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

SB_PARITY_OVER_FLOATING_DTYPES(RandomParity);

}  // namespace
}  // namespace shardbook::parity
