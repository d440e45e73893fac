#include "core/kernels/layout.h"

#include <algorithm>
#include <numeric>

#include "core/check.h"
#include "tests/kernels/support.h"

namespace shardbook::kernels {
namespace {

class Layout : public KernelTest {};

TEST_P(Layout, PermutesInAllOrders) {
  for (const Dims& shape : {Dims{2, 3, 4, 5}, Dims{1, 70, 33, 2},
                            Dims{3, 17, 1, 64}, Dims{2, 0, 3, 1}}) {
    const Array src = array(counting(shape_size(shape)));
    Dims order = {0, 1, 2, 3};
    do {
      Array dst(dtype, src.size());
      permute(context, dtype, shape, order, src.data(), dst.data());
      expect_close(dst, xt::transpose(src.as(shape), order), 0);
    } while (std::next_permutation(order.begin(), order.end()));
  }
}

TEST_P(Layout, DoesNotDependOnThreads) {
  const Array src = array(counting(300 * 400));
  Array one(dtype, src.size()), three(dtype, src.size());
  with_threads(1, [&] {
    permute(context, dtype, {3, 100, 400}, {2, 0, 1}, src.data(), one.data());
  });
  with_threads(3, [&] {
    permute(context, dtype, {3, 100, 400}, {2, 0, 1}, src.data(), three.data());
  });
  EXPECT_TRUE(one == three);
}

SB_OVER_ALL_DTYPES(Layout);

TEST(LayoutErrors, OrdersThatAreNone) {
  KernelContext context;
  double x[4] = {}, y[4];
  EXPECT_THROW(permute(context, DType::kF64, {2, 2}, {0, 0}, x, y), Error);
  EXPECT_THROW(permute(context, DType::kF64, {2, 2}, {0, 2}, x, y), Error);
  EXPECT_THROW(permute(context, DType::kF64, {2, 2}, {0}, x, y), Error);
  EXPECT_THROW(copy_strided(context, DType::kF64, {2}, x, {1, 1}, y, {1}),
               Error);
}

}  // namespace
}  // namespace shardbook::kernels
