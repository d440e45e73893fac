#include "core/kernels/reduce.h"

#include <limits>

#include "core/check.h"
#include "tests/kernels/support.h"

namespace shardbook::kernels {
namespace {

class Reduce : public KernelTest {
 protected:
  double sum_tolerance(std::int64_t n) const {
    return tolerance(dtype) * std::sqrt(static_cast<double>(n) + 1.0);
  }
};

TEST_P(Reduce, SumRowsAddsOverRows) {
  const std::int64_t shapes[][2] = {{1, 1}, {3, 5}, {200, 33}, {300, 300},
                                    {0, 7}, {7, 0}, {129, 128}};
  for (const auto& [rows, cols] : shapes) {
    const Array x = array(noise(rows * cols, 3));
    Array out = array(cols);
    sum_rows(context, dtype, rows, cols, x.data(), out.data());
    expect_close(out, xt::sum(x.as({rows, cols}), {0}), sum_tolerance(rows));
  }
}

TEST_P(Reduce, SumToShapeUndoesBroadcasting) {
  for (const auto& [x_shape, out_shape] : kReductions) {
    const std::int64_t n = shape_size(x_shape);
    const Array x = array(noise(n, 8));
    // Where the result has no dim or one of size 1, x is summed
    std::vector<std::size_t> axes;
    const std::size_t missing = x_shape.size() - out_shape.size();
    for (std::size_t d = 0; d < x_shape.size(); ++d) {
      if (d < missing || out_shape[d - missing] == 1) axes.push_back(d);
    }
    const Values expected = xt::sum(x.as(x_shape), axes);
    Array out = array(shape_size(out_shape));
    sum_to_shape(context, dtype, x_shape, x.data(), out_shape, out.data());
    expect_close(out, xt::flatten(expected), sum_tolerance(n));
  }
}

TEST_P(Reduce, SumsOfEverythingAddInF64) {
  const std::int64_t n = 100001;
  const Array x = array(noise(n, 2));
  const Values in = x.as({n});
  Array sum = array(1);
  sum_all_into(context, dtype, n, 0.5, x.data(), sum.data());
  expect_close(sum, xt::sum(in) / 2.0, tolerance(dtype));
  EXPECT_NEAR(sum_squares(context, dtype, n, x.data()),
              xt::sum(xt::square(in))(), 1e-8);
}

TEST_P(Reduce, DoesNotDependOnThreads) {
  const std::int64_t rows = 700, cols = 130;
  const Array x = array(noise(rows * cols, 2));
  std::vector<Array> arrays;
  for (const int threads : {1, 2, 5}) {
    with_threads(threads, [&] {
      Array by_row = array(rows), by_col = array(cols), sum = array(1);
      sum_rows(context, dtype, rows, cols, x.data(), by_col.data());
      sum_to_shape(context, dtype, {rows, cols}, x.data(), {rows, 1},
                   by_row.data());
      sum_all_into(context, dtype, rows * cols, 1.0, x.data(), sum.data());
      for (const Array& array : {by_row, by_col, sum}) arrays.push_back(array);
    });
  }
  for (std::size_t i = 3; i < arrays.size(); ++i) {
    EXPECT_TRUE(arrays[i] == arrays[i % 3]) << i;
  }
}

TEST_P(Reduce, DifferencesAreMaximal) {
  std::vector<double> a = noise(20000, 1), b;
  a[17000] = kInf;
  b = a;
  b[12345] += 0.5;
  const Array x = array(a), y = array(b);
  const double expected = std::fabs(x.values()[12345] - y.values()[12345]);
  EXPECT_EQ(max_abs_difference(context, dtype, 20000, x.data(), y.data()),
            expected);
  b[3] = kNan;
  const Array z = array(b);
  EXPECT_TRUE(std::isnan(
      max_abs_difference(context, dtype, 20000, x.data(), z.data())));
  EXPECT_EQ(max_abs_difference(context, dtype, 0, x.data(), z.data()), 0.0);
}

SB_OVER_FLOATING_DTYPES(Reduce);

TEST(ReduceErrors, ShapesThatDoNotReduce) {
  KernelContext context;
  double x[12] = {};
  EXPECT_THROW(sum_to_shape(context, DType::kF64, {3, 4}, x, {3}, x), Error);
  EXPECT_THROW(sum_to_shape(context, DType::kF64, {4}, x, {1, 4}, x), Error);
  EXPECT_THROW(sum_rows(context, DType::kI32, 1, 1, x, x), Error);
}

}  // namespace
}  // namespace shardbook::kernels
