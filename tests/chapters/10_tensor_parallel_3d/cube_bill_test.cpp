// The page's table against runs on shapes: bytes, memory, time of a step.

#include <gtest/gtest.h>

#include <string>

#include "tests/chapters/08_tensor_parallel_2d/bill_support.h"
#include "tests/chapters/10_tensor_parallel_3d/cube_support.h"

namespace shardbook::textbook::cube_bill {
namespace {

using sharded_test::activation_peak;

struct Case {
  int l = 1;
  std::int64_t vocabulary = 0, batch = 0;
  bool keep_gathered = true;
  Passes passes = {};
};

void expect_bill_of(const Case& c, DType dtype, double dropout) {
  SCOPED_TRACE(testing::Message()
               << "l " << c.l << " V " << c.vocabulary << " keep "
               << c.keep_gathered << " m " << c.passes.micro_batches
               << " recompute " << c.passes.recompute << " "
               << dtype_name(dtype));
  Options options = gpt_options(1, c.vocabulary, c.batch);
  options.dtype = dtype;
  options.dropout = dropout;
  const Report report =
      cube_test::trained_on_cube(options, c.l, c.keep_gathered, c.passes);
  sharded_test::expect_bill(report);
  expect_closed_form(report);
}

// 27 ranks included.
TEST(CubeBill, EqualsARunOnShapes) {
  for (const Case& c :
       {Case{1, 64, 6}, Case{2, 64, 8}, Case{2, 1001, 12},
        Case{2, 50, 4, false}, Case{3, 50, 9}, Case{3, 500, 18, false},
        Case{4, 4096, 16}, Case{1, 64, 6, true, {2, true}},
        Case{2, 64, 24, true, {3, false}}, Case{2, 1001, 12, true, {1, true}},
        Case{2, 50, 16, false, {4, true}}, Case{2, 2000, 8, false, {2, false}},
        Case{3, 50, 18, true, {2, true}}}) {
    expect_bill_of(c, DType::kF32, 0);
  }
  for (const Case& c : {Case{2, 64, 24, true, {3, true}},
                        Case{2, 1001, 8, false}, Case{2, 64, 8}}) {
    expect_bill_of(c, DType::kF64, 0.1);
    expect_bill_of(c, DType::kBF16, 0.1);
  }
}

TEST(CubeBill, OfALlamaEqualsARunOnShapes) {
  for (const std::string family : {"llama", "qwen2", "qwen3"}) {
    for (const Case& c :
         {Case{1}, Case{2}, Case{3, 0, 0, false},
          Case{2, 0, 0, true, {2, true}}, Case{2, 0, 0, false, {2, true}}}) {
      Options options = odd_llama(family);
      options.batch = 72;
      options.backend = "sim";
      options.cluster = "textbook";
      const Report report =
          cube_test::trained_on_cube(options, c.l, c.keep_gathered, c.passes);
      sharded_test::expect_bill(report);
      expect_closed_form(report);
    }
  }
}

// At the head, in f32; 40 tokens, 72 columns, 2048 classes on a rank. Kept:
// 16 * 72 and statistics by each block, 2 * 72 and 2 by the last norm, the
// gathered embedding, the loss and its gradient. At the head: x and the table
// gathered, the logits' gradient, own and gathered; dX, dW; dX after its sum.
TEST(CubeBill, ThePeakIsAtTheHead) {
  const Report report =
      cube_test::trained_on_cube(gpt_options(8, 4096, 8), 2, false);
  const double x = 40 * 72, table = 2048 * 72, logits = 40 * 2048;
  const double kept = 2 * (16 * x + 40 * 10) + 2 * x + 40 * 2 + table + 2;
  EXPECT_EQ(activation_peak(report.ranks[0]),
            4 * (kept + 2 * x + table + 3 * logits + 2 * x + table + x));
}

}  // namespace
}  // namespace shardbook::textbook::cube_bill
