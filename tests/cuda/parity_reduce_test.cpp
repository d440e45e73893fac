#include <cmath>
#include <functional>

#include "core/check.h"
#include "core/kernels/reduce.h"
#include "tests/cuda/parity.h"
#include "tests/cuda/parity_orders.h"

namespace shardbook::parity {
namespace {

using kernels::Dims;
using kernels::noise;
using kernels::tolerance;
using Shape = std::pair<std::int64_t, std::int64_t>;

// CUDA adds in another order than the CPU: n roundings of sums of noise, which
// are below sqrt(n) or so.
double sum_tolerance(DType dtype, std::int64_t n) {
  return tolerance(dtype) * (1 + 0.05 * std::sqrt(static_cast<double>(n)));
}

class ReduceParity : public ParityTest {};

TEST_P(ReduceParity, SumRows) {
  for (const auto& [rows, cols] : {Shape{1, 1},
                                   {5, 3},
                                   {128, 16},
                                   {129, 40},
                                   {300, 33},
                                   {40, 600},
                                   {65, 256},
                                   {0, 4},
                                   {4, 0},
                                   {700, 8}}) {
    for (const bool accumulate : {false, true}) {
      Comparison c;
      c.expect_equal(kernels::sum_rows, sum_tolerance(dtype, rows), dtype, rows,
                     cols, c.array(dtype, noise(rows * cols, 1)),
                     c.array(dtype, noise(cols, 2)), accumulate);
    }
  }
}

TEST_P(ReduceParity, SumLast) {
  for (const auto& [rows, cols] : {Shape{1, 1},
                                   {3, 5},
                                   {70, 32},
                                   {9, 1000},
                                   {2, 1025},
                                   {5, 2048},
                                   {600, 3},
                                   {1, 30001},
                                   {3, 20000},
                                   {4, 0},
                                   {0, 4}}) {
    for (const bool accumulate : {false, true}) {
      Comparison c;
      c.expect_equal(kernels::sum_last, sum_tolerance(dtype, cols), dtype, rows,
                     cols, c.array(dtype, noise(rows * cols, 3)),
                     c.array(dtype, noise(rows, 4)), accumulate);
    }
  }
}

TEST_P(ReduceParity, SumToShape) {
  const std::pair<Dims, Dims> shapes[] = {{{4, 5}, {5}},
                                          {{4, 5}, {4, 1}},
                                          {{4, 5}, {}},
                                          {{4, 5}, {4, 5}},
                                          {{2, 3, 4}, {3, 1}},
                                          {{2, 3, 4}, {2, 1, 4}},
                                          {{2, 3, 4, 5}, {3, 1, 5}},
                                          {{2, 3, 4, 5}, {2, 1, 4, 1}},
                                          {{3, 2, 3, 4, 5, 2}, {2, 1, 4, 1, 2}},
                                          {{1, 1}, {1}},
                                          {{0, 3}, {3}},
                                          {{3, 20, 70}, {1, 70}},
                                          {{4, 8, 9, 9}, {8, 1, 1}}};
  for (const auto& [x_shape, out_shape] : shapes) {
    for (const bool accumulate : {false, true}) {
      Comparison c;
      c.expect_equal(kernels::sum_to_shape,
                     sum_tolerance(dtype, elements_of(x_shape)), dtype, x_shape,
                     c.array(dtype, noise(elements_of(x_shape), 8)), out_shape,
                     c.array(dtype, noise(elements_of(out_shape), 9)),
                     accumulate);
    }
  }
}

TEST_P(ReduceParity, SumsOfSquares) {
  for (const std::int64_t n : lengths()) {
    Comparison c;
    c.expect_equal(kernels::sum_squares, 1e-12, dtype, n,
                   c.array(dtype, noise(n, 2)));
  }
}

TEST_P(ReduceParity, MaximaAndTheirPlaces) {
  for (const auto& [rows, cols] :
       {Shape{1, 1}, {40, 7}, {9, 33}, {5, 512}, {3, 513}, {2, 3000}}) {
    std::vector<double> values = noise(rows * cols, 6);
    // Ties, whose first place wins; NaN, which wins over numbers; -inf only.
    for (double& x : values) x = std::round(4 * x);
    if (rows > 1) values[cols + cols / 2] = std::nan("");
    if (rows > 1) values[2 * cols - 1] = std::nan("");
    for (std::int64_t i = 2 * cols; i < std::min(rows, std::int64_t{3}) * cols;
         ++i) {
      values[i] = -kernels::kInf;
    }
    Comparison c;
    const Slot x = c.array(dtype, values);
    c.expect_equal(kernels::max_last, 0, dtype, rows, cols, x,
                   c.empty(dtype, rows));
    c.expect_equal(kernels::argmax_last, 0, dtype, rows, cols, x,
                   c.empty(DType::kI64, rows));
  }
}

TEST_P(ReduceParity, CountsWhatIsNotFinite) {
  for (const std::int64_t n : lengths()) {
    std::vector<double> values = noise(n, 6);
    for (std::int64_t i = 3; i < n; i += 50) values[i] = std::nan("");
    for (std::int64_t i = 7; i < n; i += 70) values[i] = -kernels::kInf;
    Comparison c;
    c.expect_equal(kernels::count_nonfinite, 0, dtype, n,
                   c.array(dtype, values));
  }
}

// The order of additions is fixed: neither the order in which blocks and threads
// run nor where an array begins may show in the last bit.
TEST_P(ReduceParity, RepeatsBitForBit) {
  const std::int64_t rows = 300, cols = 72, n = rows * cols;
  const kernels::Array values(dtype, noise(n, 7));
  const std::size_t bytes = dtype_bytes(dtype);
  CudaContext context;
  DeviceArray x((n + 1) * bytes), by_column(cols * bytes), total(bytes);
  std::vector<std::vector<char>> results;
  for (const std::size_t skip : {std::size_t{0}, bytes}) {
    for (int order = 0; order < num_orders(); ++order) {
      choose_order(order);
      std::vector<char> padded((n + 1) * bytes);
      std::copy_n(static_cast<const char*>(values.data()), n * bytes,
                  padded.begin() + static_cast<std::ptrdiff_t>(skip));
      x.write(context, padded.data());
      const char* from = static_cast<const char*>(x.data()) + skip;
      kernels::sum_rows(context.kernels(), dtype, rows, cols, from,
                        by_column.data(), false);
      kernels::sum_last(context.kernels(), dtype, 1, n, from, total.data(),
                        false);
      std::vector<char> result((cols + 1) * bytes);
      by_column.read(context, result.data());
      total.read(context, result.data() + cols * bytes);
      results.push_back(result);
    }
  }
  choose_order(0);
  for (const auto& result : results) EXPECT_EQ(result, results[0]);
}

SB_PARITY_OVER_FLOATING_DTYPES(ReduceParity);

class TotalParity : public ParityTest {};

TEST_P(TotalParity, SumsMaximaAndDifferences) {
  for (const std::int64_t n : {0, 1, 2, 33, 1000, 20011}) {
    std::vector<double> values = noise(n, 2), other = noise(n, 3);
    for (double& x : values) x *= 50;
    for (double& x : other) x *= 50;
    for (const bool with_nan : {false, true}) {
      const bool is_integer = dtype == DType::kI64 || dtype == DType::kI32;
      if (with_nan && (is_integer || n < 30)) continue;
      if (with_nan) values[17] = std::nan(""), other[20] = kernels::kInf;
      Comparison c;
      const Slot a = c.array(dtype, values), b = c.array(dtype, other);
      c.expect_equal(kernels::sum_all, 1e-12, dtype, n, a);
      c.expect_equal(kernels::max_abs, 0, dtype, n, a);
      c.expect_equal(kernels::max_abs, 0, dtype, n, b);
      c.expect_equal(kernels::max_abs_difference, 0, dtype, n, a, b);
      c.expect_equal(kernels::max_abs_difference, 0, dtype, n, b, b);
    }
  }
}

SB_PARITY_OVER_ALL_DTYPES(TotalParity);

TEST(ReduceParityErrors, AreTheCpus) {
  CudaContext context;
  double x[4] = {};
  std::int64_t place;
  EXPECT_THROW(kernels::sum_to_shape(context.kernels(), DType::kF64, {4}, x,
                                     {2}, x, false),
               Error);
  EXPECT_THROW(
      kernels::argmax_last(context.kernels(), DType::kF64, 1, 0, x, &place),
      Error);
  EXPECT_THROW(
      kernels::sum_rows(context.kernels(), DType::kI64, 1, 1, x, x, false),
      Error);
}

}  // namespace
}  // namespace shardbook::parity
