#include <algorithm>

#include "core/check.h"
#include "core/kernels/layout.h"
#include "tests/cuda/parity.h"

namespace shardbook::parity {
namespace {

using kernels::contiguous_strides;
using kernels::Dims;

// 0, 1, 2, ... below 128, so that every dtype holds them.
std::vector<double> counting(std::int64_t n) {
  std::vector<double> values(n);
  for (std::int64_t i = 0; i < n; ++i) {
    values[i] = static_cast<double>(i * 37 % 127);
  }
  return values;
}

class LayoutParity : public ParityTest {};

TEST_P(LayoutParity, PermutesInAllOrders) {
  for (const Dims& shape : {Dims{2, 3, 4, 5}, Dims{1, 70, 33, 2},
                            Dims{3, 17, 1, 16}, Dims{2, 0, 3, 1}}) {
    Dims order = {0, 1, 2, 3};
    do {
      Comparison c;
      c.expect_equal(kernels::permute, 0, dtype, shape, order,
                     c.array(dtype, counting(elements_of(shape))),
                     c.empty(dtype, elements_of(shape)));
    } while (std::next_permutation(order.begin(), order.end()));
  }
}

TEST_P(LayoutParity, TransposesAnySize) {
  const std::int64_t shapes[][3] = {{1, 1, 1},    {1, 5, 3},   {2, 16, 16},
                                    {3, 100, 37}, {1, 12, 65}, {1, 70, 130},
                                    {0, 3, 4},    {2, 64, 32}, {40, 2, 3}};
  for (const auto& [batch, rows, cols] : shapes) {
    Comparison c;
    c.expect_equal(kernels::transpose, 0, dtype, batch, rows, cols,
                   c.array(dtype, counting(batch * rows * cols)),
                   c.empty(dtype, batch * rows * cols));
  }
}

// Blocks of all widths: words of 2 to 16 bytes, from places of every alignment.
TEST_P(LayoutParity, CopiesBlocks) {
  const auto bytes = static_cast<std::int64_t>(dtype_bytes(dtype));
  for (const std::int64_t cols : {24, 25, 32}) {
    for (const std::int64_t width : {1, 2, 3, 4, 7, 8, 16, 24}) {
      for (const std::int64_t first : {0, 1, 2, 4, 8}) {
        if (first + width > cols) continue;
        const auto cut = [&](KernelContext& context, const char* src,
                             void* dst) {
          kernels::copy_strided(context, dtype, {5, 3, width},
                                src + first * bytes, {3 * cols, cols, 1}, dst,
                                {3 * width, width, 1});
        };
        const auto paste = [&](KernelContext& context, const void* src,
                               char* dst) {
          kernels::copy_strided(context, dtype, {5, 3, width}, src,
                                {3 * width, width, 1}, dst + first * bytes,
                                {3 * cols, cols, 1});
        };
        Comparison c;
        c.expect_equal(cut, 0, c.array(dtype, counting(15 * cols)),
                       c.empty(dtype, 15 * width));
        c.expect_equal(paste, 0, c.array(dtype, counting(15 * width)),
                       c.array(dtype, std::vector<double>(15 * cols, 1)));
      }
    }
  }
}

TEST_P(LayoutParity, RepeatsAndSkips) {
  Comparison c;
  const Slot src = c.array(dtype, counting(100));
  const auto copy = [&](const Dims& shape, const Dims& from, const Dims& to) {
    c.expect_equal(kernels::copy_strided, 0, dtype, shape, src, from,
                   c.array(dtype, std::vector<double>(100, 1)), to);
  };
  copy({3, 4}, {0, 1}, {4, 1});
  copy({4, 3}, {1, 0}, {3, 1});
  copy({}, {}, {});
  copy({9}, {3}, {1});
  copy({9}, {1}, {7});
  copy({2, 2, 2, 2, 2, 1, 2}, {1, 2, 4, 8, 16, 0, 32}, {32, 16, 1, 4, 2, 5, 8});
}

SB_PARITY_OVER_ALL_DTYPES(LayoutParity);

TEST(LayoutParityErrors, AreTheCpus) {
  CudaContext context;
  double x[4] = {}, y[4];
  EXPECT_THROW(
      kernels::permute(context.kernels(), DType::kF64, {2, 2}, {0, 0}, x, y),
      Error);
  EXPECT_THROW(kernels::copy_strided(context.kernels(), DType::kF64, {2}, x,
                                     {1, 1}, y, {1}),
               Error);
}

}  // namespace
}  // namespace shardbook::parity
