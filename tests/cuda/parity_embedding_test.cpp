#include "core/kernels/embedding.h"
#include "tests/cuda/parity.h"

namespace shardbook::parity {
namespace {

using kernels::TableShape;

// Bit-equal: a row adds its gradients in the order of their positions.
class TableParity : public ParityTest {
 protected:
  // Also as integers, hardly one is 0.
  static std::vector<double> numbers(std::int64_t n, std::uint64_t seed) {
    return scaled(90, kernels::noise(n, seed));
  }
  template <typename Kernel>
  void check(const Kernel& kernel, const TableShape& shape, DType index,
             const std::vector<double>& indices) const {
    const auto n = static_cast<std::int64_t>(indices.size());
    Comparison c(dtype);
    c.expect_equal(
        kernel, 0, dtype, shape, c.array(numbers(shape.rows * shape.cols, 1)),
        index, c.array(index, indices), n, c.array(numbers(n * shape.cols, 2)));
  }
};

class GatherParity : public TableParity {};

TEST_P(GatherParity, ReadsRowsByBothTypesOfIndex) {
  for (const DType index : {DType::kI64, DType::kI32}) {
    for (const std::int64_t cols : {1, 2, 5, 8, 300}) {
      check(kernels::gather_rows, {10, cols}, index, {3, 0, 3, 9, 5, 3, 0});
    }
  }
}

// GPT-2's vocabulary, from its first row to its last.
const TableShape kVocabulary{50257, 3};
const std::vector<double> kTokens = {50256, 0, 31337, 50256};

TEST_P(GatherParity, ReadsRowsOfAVocabulary) {
  check(kernels::gather_rows, kVocabulary, DType::kI64, kTokens);
}

TEST_P(GatherParity, ReadsZerosForForeignRows) {
  check(kernels::gather_rows, {4, 12, 3, true}, DType::kI64,
        {3, 0, 6, 9, 5, 2, 7});
}

SB_OVER_ALL_DTYPES(GatherParity);

class ScatterParity : public TableParity {};

TEST_P(ScatterParity, AddsInIncreasingOrder) {
  // More positions than one tile of the sort holds, too.
  for (const std::int64_t n : {0, 1, 7, 300, 5000}) {
    for (const std::int64_t cols : {1, 16, 35}) {
      for (const std::int64_t rows : {1, 10, 700}) {
        if (n > 1000 && (cols > 1 || rows != 10)) continue;
        std::vector<double> indices;
        for (std::int64_t i = 0; i < n; ++i) {
          indices.push_back(static_cast<double>(i * i % 997 % rows));
        }
        check(kernels::scatter_add_rows, {rows, cols}, DType::kI64, indices);
      }
    }
  }
}

TEST_P(ScatterParity, AddsToRowsOfAVocabulary) {
  check(kernels::scatter_add_rows, kVocabulary, DType::kI64, kTokens);
}

TEST_P(ScatterParity, LeavesForeignRowsAlone) {
  for (const std::int64_t cols : {3, 16, 2000}) {
    check(kernels::scatter_add_rows, {4, cols, 3, true}, DType::kI32,
          {3, 0, 6, 9, 6, 2, 7});
  }
}

SB_OVER_FLOATING_DTYPES(ScatterParity);

}  // namespace
}  // namespace shardbook::parity
