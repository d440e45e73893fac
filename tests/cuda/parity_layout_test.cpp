#include <algorithm>

#include "core/kernels/layout.h"
#include "tests/cuda/parity.h"

namespace shardbook::parity {
namespace {

using kernels::counting;
using kernels::Dims;
using kernels::shape_size;

class LayoutParity : public ParityTest {};

TEST_P(LayoutParity, PermutesInAllOrders) {
  for (const Dims& shape : {Dims{2, 3, 4, 5}, Dims{1, 70, 33, 2},
                            Dims{3, 17, 1, 16}, Dims{2, 0, 3, 1}}) {
    Dims order = {0, 1, 2, 3};
    do {
      Comparison c(dtype);
      c.expect_equal(kernels::permute, 0, dtype, shape, order,
                     c.array(counting(shape_size(shape))),
                     c.empty(shape_size(shape)));
    } while (std::next_permutation(order.begin(), order.end()));
  }
}

TEST_P(LayoutParity, TransposesAnySize) {
  const std::int64_t shapes[][3] = {{1, 1, 1},    {1, 5, 3},   {2, 16, 16},
                                    {3, 100, 37}, {1, 12, 65}, {1, 70, 130},
                                    {0, 3, 4},    {2, 64, 32}, {40, 2, 3}};
  for (const auto& [batch, rows, cols] : shapes) {
    Comparison c(dtype);
    c.expect_equal(kernels::permute, 0, dtype, Dims{batch, rows, cols},
                   Dims{0, 2, 1}, c.array(counting(batch * rows * cols)),
                   c.empty(batch * rows * cols));
  }
}

// Blocks of all widths: words of 2 to 16 bytes, from places of every alignment.
TEST_P(LayoutParity, CopiesBlocks) {
  for (const std::int64_t cols : {24, 25, 32}) {
    for (const std::int64_t width : {1, 2, 3, 4, 7, 8, 16, 24}) {
      for (const std::int64_t first : {0, 1, 2, 4, 8}) {
        if (first + width > cols) continue;
        const Dims shape = {5, 3, width}, wide = {3 * cols, cols, 1};
        const Dims narrow = {3 * width, width, 1};
        Comparison cut(dtype), paste(dtype);
        const Slot whole = cut.array(counting(15 * cols));
        const Slot part = cut.empty(15 * width);
        cut.expect_equal_in(0, [&](const auto& on) {
          kernels::copy_strided(on.context, dtype, shape, on.from(whole, first),
                                wide, on(part), narrow);
        });
        const Slot piece = paste.array(counting(15 * width));
        const Slot target = paste.array(std::vector<double>(15 * cols, 1));
        paste.expect_equal_in(0, [&](const auto& on) {
          kernels::copy_strided(on.context, dtype, shape, on(piece), narrow,
                                on.from(target, first), wide);
        });
      }
    }
  }
}

TEST_P(LayoutParity, RepeatsAndSkips) {
  Comparison c(dtype);
  const Slot src = c.array(counting(100));
  const auto copy = [&](const Dims& shape, const Dims& from, const Dims& to) {
    c.expect_equal(kernels::copy_strided, 0, dtype, shape, src, from,
                   c.array(std::vector<double>(100, 1)), to);
  };
  copy({3, 4}, {0, 1}, {4, 1});
  copy({4, 3}, {1, 0}, {3, 1});
  copy({}, {}, {});
  copy({9}, {3}, {1});
  copy({9}, {1}, {7});
  copy({2, 2, 2, 2, 2, 1, 2}, {1, 2, 4, 8, 16, 0, 32}, {32, 16, 1, 4, 2, 5, 8});
}

SB_OVER_ALL_DTYPES(LayoutParity);

}  // namespace
}  // namespace shardbook::parity
