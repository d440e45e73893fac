#include "core/kernels/swiglu.h"
#include "tests/cuda/parity.h"

namespace shardbook::parity {
namespace {

using kernels::noise;
using kernels::tolerance;

/// None, one, odd; whole vectors and single elements; more than one block.
const Matrix kGates[] = {{0, 4},   {3, 0},    {1, 1},    {3, 5},  {5, 64},
                         {7, 100}, {2, 1000}, {1, 4099}, {90, 64}};

class SwigluParity : public ParityTest {};

TEST_P(SwigluParity, ForwardEqualsTheCpu) {
  for (const auto& [rows, cols] : kGates) {
    Comparison c(dtype);
    c.expect_equal(kernels::swiglu, 2 * tolerance(dtype), dtype, rows, cols,
                   c.array(scaled(6, noise(2 * rows * cols, 1))),
                   c.empty(rows * cols));
  }
}

TEST_P(SwigluParity, BackwardEqualsTheCpu) {
  for (const auto& [rows, cols] : kGates) {
    Comparison c(dtype);
    c.expect_equal(kernels::swiglu_backward, 2 * tolerance(dtype), dtype, rows,
                   cols, c.array(scaled(6, noise(2 * rows * cols, 1))),
                   c.noise(rows * cols, 2), c.empty(2 * rows * cols));
  }
}

SB_OVER_FLOATING_DTYPES(SwigluParity);

}  // namespace
}  // namespace shardbook::parity
