#include <cmath>

#include "core/kernels/reduce.h"
#include "tests/cuda/parity.h"

namespace shardbook::parity {
namespace {

using kernels::Dims;
using kernels::noise;
using kernels::shape_size;
using kernels::tolerance;

// CUDA adds in another order than the CPU: n roundings of sums of noise, which
// are below sqrt(n) or so.
double sum_tolerance(DType dtype, std::int64_t n) {
  return tolerance(dtype) * (1 + 0.05 * std::sqrt(static_cast<double>(n)));
}

class ReduceParity : public ParityTest {};

TEST_P(ReduceParity, SumRows) {
  const Matrix all[] = {{1, 1},    {5, 3},    {128, 16}, {129, 40}, {300, 33},
                        {40, 600}, {65, 256}, {0, 4},    {4, 0},    {700, 8}};
  for (const auto& [rows, cols] : all) {
    Comparison c(dtype);
    c.expect_equal(kernels::sum_rows, sum_tolerance(dtype, rows), dtype, rows,
                   cols, c.noise(rows * cols, 1), c.noise(cols, 2));
  }
}

TEST_P(ReduceParity, SumToShape) {
  for (const auto& [x_shape, out_shape] : kernels::kReductions) {
    Comparison c(dtype);
    c.expect_equal(kernels::sum_to_shape,
                   sum_tolerance(dtype, shape_size(x_shape)), dtype, x_shape,
                   c.noise(shape_size(x_shape), 8), out_shape,
                   c.noise(shape_size(out_shape), 9));
  }
}

TEST_P(ReduceParity, SumsOfSquares) {
  for (const std::int64_t n : lengths()) {
    Comparison c(dtype);
    c.expect_equal(kernels::sum_squares, 1e-12, dtype, n, c.noise(n, 2));
  }
}

// The order of additions is fixed: neither the order in which blocks and threads
// run nor where an array begins may show in the last bit.
TEST_P(ReduceParity, RepeatsBitForBit) {
  const std::int64_t rows = 300, cols = 72, n = rows * cols;
  const std::size_t bytes = dtype_bytes(dtype);
  CudaContext context;
  DeviceArray by_column(cols * bytes), total(bytes);
  std::vector<std::vector<char>> results;
  for (const std::int64_t skip : {0, 1}) {
    for (int order = 0; order < num_orders(); ++order) {
      choose_order(order);
      std::vector<double> values = noise(n, 7);
      values.insert(skip == 0 ? values.end() : values.begin(), 0);
      const DeviceArray x(context, Array(dtype, values));
      const char* const from =
          static_cast<const char*>(x.data().address) + skip * bytes;
      kernels::sum_rows(context.kernels(), dtype, rows, cols, from,
                        by_column.data());
      kernels::sum_to_shape(context.kernels(), dtype, {n}, from, {},
                            total.data());
      std::vector<char> result((cols + 1) * bytes);
      by_column.read(context, result.data());
      total.read(context, result.data() + cols * bytes);
      results.push_back(result);
    }
  }
  choose_order(0);
  for (const auto& result : results) EXPECT_EQ(result, results[0]);
}

SB_OVER_FLOATING_DTYPES(ReduceParity);

class TotalParity : public ParityTest {};

TEST_P(TotalParity, SumsMaximaAndDifferences) {
  for (const std::int64_t n : {0, 1, 2, 33, 1000, 20011}) {
    std::vector<double> values = scaled(50, noise(n, 2));
    std::vector<double> other = scaled(50, noise(n, 3));
    for (const bool with_nan : {false, true}) {
      const bool is_integer = dtype == DType::kI64 || dtype == DType::kI32;
      if (with_nan && (is_integer || n < 30)) continue;
      if (with_nan) values[17] = std::nan(""), other[20] = kernels::kInf;
      Comparison c(dtype);
      const Slot a = c.array(values), b = c.array(other);
      c.expect_equal(kernels::sum_all_into, tolerance(dtype), dtype, n, 1.0, a,
                     c.empty(1));
      c.expect_equal(kernels::max_abs_difference, 0, dtype, n, a, b);
      c.expect_equal(kernels::max_abs_difference, 0, dtype, n, b, b);
    }
  }
}

SB_OVER_ALL_DTYPES(TotalParity);

}  // namespace
}  // namespace shardbook::parity
