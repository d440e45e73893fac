// A whole GPT in blocks, and the documents' MLP.

#include <gtest/gtest.h>

#include <string>

#include "chapters/08_tensor_parallel_2d/operators.h"
#include "chapters/08_tensor_parallel_2d/summa_strategy.h"
#include "tests/chapters/08_tensor_parallel_2d/bill_support.h"

namespace shardbook::summa_test {
namespace {

class SummaGpt : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sides, SummaGpt, testing::Values(1, 2, 3));

TEST_P(SummaGpt, TrainsAsOnOneDevice) {
  for (const double dropout : {0.0, 0.2}) {
    for (const Passes& passes : {Passes{}, Passes{2, true}}) {
      const Report report = textbook::on_squares(textbook::odd_gpt(dropout),
                                                 GetParam(), 1, passes);
      sharded_test::expect_claims(report, "SUMMA");
      if (GetParam() == 1) {
        EXPECT_EQ(report.parity.max_abs, 0);
      }
    }
  }
}

// Unequal columns of queries and keys, [gate | up], vectors of them that are cut
// twice, an output layer of its own.
TEST_P(SummaGpt, ALlamaTrainsAsOnOneDevice) {
  for (const std::string family : {"llama", "qwen3"}) {
    for (const Passes& passes : {Passes{}, Passes{2, true}}) {
      Options options = textbook::odd_llama(family);
      options.clip = 0.05;
      sharded_test::expect_claims(
          textbook::on_squares(options, GetParam(), 1, passes), family);
    }
  }
}

TEST(SummaMlp, HasTheShapesAndMessagesOfTheDocuments) {
  struct Run {
    std::vector<Shape> shapes;
    double sent = 0, difference = 0;
  };
  const auto runs = on_grid({2}, [](const Grid& grid, ProcessGroup& world) {
    Run run;
    const auto dtype = DType::kF64;
    const Tensor x = drawn({16, 256}, dtype, 1);
    const Tensor w1 = drawn({256, 1024}, dtype, 2);
    const Tensor w2 = drawn({1024, 256}, dtype, 3);
    // As in the documents: rows by the rank in COL, columns by the rank in ROW
    Tensor own =
        slice(slice(x, 0, 8 * grid.col->rank(), 8 * grid.col->rank() + 8), 1,
              128 * grid.row->rank(), 128 * grid.row->rank() + 128)
            .detach();
    own.set_requires_grad();
    Tensor a = part_of(w1, Lies::kMatrix, grid).set_requires_grad();
    Tensor b = part_of(w2, Lies::kMatrix, grid).set_requires_grad();
    const Tensor inner = summa::linear(own, a, Tensor(), grid);
    const Tensor y = summa::linear(inner, b, Tensor(), grid);
    autograd::backward({y}, {drawn(y.shape(), dtype, 4)});
    run.shapes = {own.shape(), a.shape(), b.shape(), inner.shape(), y.shape()};
    run.sent = elements_sent(world);
    run.difference = max_abs_difference(
        y.detach(), part_of(matmul(matmul(x, w1), w2), Lies::kMatrix, grid));
    return run;
  });
  for (const Run& run : runs) {
    EXPECT_EQ(run.shapes,
              (std::vector<Shape>{
                  {8, 128}, {128, 512}, {512, 128}, {8, 512}, {8, 128}}));
    EXPECT_EQ(run.sent, 408576);
    EXPECT_LT(run.difference, 1e-9);
  }
}

}  // namespace
}  // namespace shardbook::summa_test
