#include "core/kernels/embedding.h"

#include "tests/kernels/support.h"

namespace shardbook::kernels {
namespace {

class Embedding : public KernelTest {
 protected:
  const std::vector<std::int64_t> indices_ = {3, 0, 3, 9, 5, 3, 0};
};

TEST_P(Embedding, GathersRows) {
  for (const std::int64_t cols : {1, 5, 300}) {
    const TableShape shape{10, cols};
    const Array table = array(noise(10 * cols, 1));
    Array out = array(7 * cols), again = array(7 * cols);
    gather_rows(context, dtype, shape, table.data(), DType::kI64,
                indices_.data(), 7, out.data());
    expect_close(
        out, xt::view(table.as({10, cols}), xt::keep(indices_), xt::all()), 0);
    const std::vector<std::int32_t> narrow(indices_.begin(), indices_.end());
    gather_rows(context, dtype, shape, table.data(), DType::kI32, narrow.data(),
                7, again.data());
    EXPECT_TRUE(again == out);
  }
}

TEST_P(Embedding, ScattersSums) {
  for (const std::int64_t cols : {1, 5, 300}) {
    const TableShape shape{10, cols};
    Array table = array(noise(10 * cols, 1));
    const Array values = array(noise(7 * cols, 2));
    Values expected = table.as({10, cols});
    const Values add = values.as({7, cols});
    for (int i = 0; i < 7; ++i)
      xt::row(expected, indices_[i]) += xt::row(add, i);
    scatter_add_rows(context, dtype, shape, table.data(), DType::kI64,
                     indices_.data(), 7, values.data());
    expect_close(table, expected, tolerance(dtype));
  }
}

// The shards of a table together do what the whole table does.
TEST_P(Embedding, ShardsSkipForeignRows) {
  const std::int64_t cols = 20;
  const Array table = array(noise(10 * cols, 1));
  const Array values = array(noise(7 * cols, 2));
  Array whole = array(7 * cols), sum = array(7 * cols), part = array(7 * cols);
  gather_rows(context, dtype, {10, cols}, table.data(), DType::kI64,
              indices_.data(), 7, whole.data());
  Array grad = array(10 * cols), shard_grad = array(10 * cols);
  scatter_add_rows(context, dtype, {10, cols}, grad.data(), DType::kI64,
                   indices_.data(), 7, values.data());
  const std::int64_t row_bytes = cols * dtype_bytes(dtype);
  for (const auto& [first, rows] :
       {std::pair<std::int64_t, std::int64_t>{0, 4}, {4, 6}}) {
    const TableShape shape{rows, cols, first, true};
    gather_rows(context, dtype, shape,
                static_cast<const char*>(table.data()) + first * row_bytes,
                DType::kI64, indices_.data(), 7, part.data());
    axpy(context, dtype, 7 * cols, 1.0, part.data(), sum.data());
    scatter_add_rows(context, dtype, shape,
                     static_cast<char*>(shard_grad.data()) + first * row_bytes,
                     DType::kI64, indices_.data(), 7, values.data());
  }
  EXPECT_EQ(sum.values(), whole.values());
  EXPECT_TRUE(shard_grad == grad);
}

SB_OVER_FLOATING_DTYPES(Embedding);

}  // namespace
}  // namespace shardbook::kernels
