#include "core/check.h"
#include "core/kernels/embedding.h"
#include "core/kernels/reduce.h"
#include "tests/cuda/parity.h"

namespace shardbook::parity {
namespace {

using kernels::noise;
using kernels::TableShape;

class GatherParity : public ParityTest {};

TEST_P(GatherParity, ReadsRowsByBothTypesOfIndex) {
  for (const DType index : {DType::kI64, DType::kI32}) {
    for (const std::int64_t cols : {1, 2, 5, 8, 300}) {
      Comparison c;
      c.expect_equal(kernels::gather_rows, 0, dtype, TableShape{10, cols},
                     c.array(dtype, noise(10 * cols, 1)), index,
                     c.array(index, {3, 0, 3, 9, 5, 3, 0}), 7,
                     c.empty(dtype, 7 * cols));
    }
  }
}

// GPT-2's, from its first row to its last.
constexpr std::int64_t kVocabulary = 50257;

TEST_P(GatherParity, ReadsRowsOfAVocabulary) {
  Comparison c;
  c.expect_equal(kernels::gather_rows, 0, dtype, TableShape{kVocabulary, 3},
                 c.array(dtype, noise(kVocabulary * 3, 1)), DType::kI64,
                 c.array(DType::kI64, {50256, 0, 31337, 50256}), 4,
                 c.empty(dtype, 4 * 3));
}

TEST_P(GatherParity, ReadsZerosForForeignRows) {
  Comparison c;
  c.expect_equal(kernels::gather_rows, 0, dtype, TableShape{4, 12, 3, true},
                 c.array(dtype, noise(4 * 12, 1)), DType::kI64,
                 c.array(DType::kI64, {3, 0, 6, 9, 5, 2, 7}), 7,
                 c.empty(dtype, 7 * 12));
}

SB_PARITY_OVER_ALL_DTYPES(GatherParity);

class ScatterParity : public ParityTest {};

// Bit-equal: a row adds its gradients in the order of their positions.
TEST_P(ScatterParity, AddsInIncreasingOrder) {
  // More positions than one tile of the sort holds, too.
  for (const std::int64_t n : {0, 1, 7, 300, 5000}) {
    for (const std::int64_t cols : {1, 16, 35}) {
      for (const std::int64_t rows : {1, 10, 700}) {
        if (n > 1000 && (cols > 1 || rows != 10)) continue;
        std::vector<double> indices(n);
        for (std::int64_t i = 0; i < n; ++i) {
          indices[i] = static_cast<double>(i * i % 997 % rows);
        }
        Comparison c;
        c.expect_equal(kernels::scatter_add_rows, 0, dtype,
                       TableShape{rows, cols},
                       c.array(dtype, noise(rows * cols, 1)), DType::kI64,
                       c.array(DType::kI64, indices), n,
                       c.array(dtype, noise(n * cols, 2)));
      }
    }
  }
}

TEST_P(ScatterParity, AddsToRowsOfAVocabulary) {
  Comparison c;
  c.expect_equal(kernels::scatter_add_rows, 0, dtype,
                 TableShape{kVocabulary, 3},
                 c.array(dtype, noise(kVocabulary * 3, 1)), DType::kI64,
                 c.array(DType::kI64, {50256, 0, 31337, 50256}), 4,
                 c.array(dtype, noise(4 * 3, 2)));
}

TEST_P(ScatterParity, LeavesForeignRowsAlone) {
  for (const std::int64_t cols : {3, 16, 2000}) {
    Comparison c;
    c.expect_equal(kernels::scatter_add_rows, 0, dtype,
                   TableShape{4, cols, 3, true},
                   c.array(dtype, noise(4 * cols, 1)), DType::kI32,
                   c.array(DType::kI32, {3, 0, 6, 9, 6, 2, 7}), 7,
                   c.array(dtype, noise(7 * cols, 2)));
  }
}

SB_PARITY_OVER_FLOATING_DTYPES(ScatterParity);

// The sentence names the index and the range.
TEST(EmbeddingParityErrors, ABadIndexIsReported) {
  for (const std::int64_t bad : {4, -1, 9}) {
    for (const bool scatters : {false, true}) {
      for (const bool skip_foreign : {false, true}) {
        CudaContext context;
        const TableShape shape{4, 1, 0, skip_foreign};
        const double zeros[4] = {};
        const std::int64_t indices[2] = {1, bad};
        DeviceArray table(sizeof(zeros)), index(sizeof(indices)), rows(16);
        table.write(context, zeros);
        index.write(context, indices);
        rows.write(context, zeros);
        if (scatters) {
          kernels::scatter_add_rows(context.kernels(), DType::kF64, shape,
                                    table.data(), DType::kI64, index.data(), 2,
                                    rows.data());
        } else {
          kernels::gather_rows(context.kernels(), DType::kF64, shape,
                               table.data(), DType::kI64, index.data(), 2,
                               rows.data());
        }
        const auto look = [&] {
          kernels::sum_all(context.kernels(), DType::kF64, 2, rows.data());
        };
        if (skip_foreign && bad >= 0) {
          EXPECT_NO_THROW(look());
        } else {
          try {
            look();
            ADD_FAILURE() << "no error for index " << bad;
          } catch (const Error& error) {
            EXPECT_NE(std::string(error.what()).find(std::to_string(bad)),
                      std::string::npos)
                << error.what();
          }
        }
      }
    }
  }
}

TEST(EmbeddingParityErrors, IndicesAreIntegers) {
  CudaContext context;
  double x[4] = {};
  EXPECT_THROW(kernels::gather_rows(context.kernels(), DType::kF64, {4, 1}, x,
                                    DType::kF64, x, 1, x),
               Error);
}

}  // namespace
}  // namespace shardbook::parity
