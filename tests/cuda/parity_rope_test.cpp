#include "core/kernels/turn_heads.h"
#include "tests/cuda/parity.h"

namespace shardbook::parity {
namespace {

using kernels::RopeArgs;
using kernels::tolerance;

class RopeParity : public ParityTest {
 protected:
  static RopeArgs make(std::int64_t rows, std::int64_t tokens,
                       std::int64_t heads, std::int64_t head_dim,
                       std::int64_t others) {
    RopeArgs args;
    args.rows = rows, args.tokens = tokens;
    args.heads = heads, args.head_dim = head_dim;
    args.width = heads * head_dim + others;
    return args;
  }
};

// Both directions; whole vectors and single pairs; columns behind the heads,
// also such that rows do not begin at vectors; none, one and many rows.
TEST_P(RopeParity, EqualsTheCpu) {
  for (RopeArgs args :
       {make(0, 0, 1, 4, 0), make(1, 1, 1, 2, 0), make(6, 3, 2, 10, 3),
        make(10, 5, 3, 16, 16), make(4, 2, 2, 64, 64), make(6, 6, 2, 80, 40),
        make(6, 2, 1, 96, 0), make(9, 3, 2, 128, 129),
        make(400, 100, 9, 64, 192)}) {
    for (const bool backward : {false, true}) {
      args.backward = backward;
      Comparison c(dtype);
      c.expect_equal(kernels::rope, tolerance(dtype), dtype, args,
                     c.noise(args.rows * args.width, 1),
                     c.noise(args.tokens * args.head_dim, 2),
                     c.empty(args.rows * args.width));
    }
  }
}

SB_OVER_FLOATING_DTYPES(RopeParity);

}  // namespace
}  // namespace shardbook::parity
