// The page's table against runs on shapes: bytes, memory, time of a step.

#include <gtest/gtest.h>

#include "chapters/10_tensor_parallel_3d/cube_strategy.h"
#include "comm/device_mesh.h"
#include "tests/chapters/08_tensor_parallel_2d/bill_support.h"

namespace shardbook::textbook::cube_bill {
namespace {

using sharded_test::activation_peak;
using sharded_test::expect_bill;

struct Case {
  int l = 1;
  std::int64_t vocabulary = 0, batch = 0;
  bool keep_gathered = true;
  Passes passes = {};
};

/// Trains on shapes on a cube of side l, of the options' ranks.
Report report_of(const Options& options, const Case& c) {
  ChapterRun chapter;
  chapter.rank = [&](const Options& options, ProcessGroup& world, Run& run) {
    DeviceMesh mesh(world, cube::cube_of(c.l));
    cube::Cube place = cube::cube_on(mesh);
    place.keep_gathered = c.keep_gathered;
    cube::CubeStrategy strategy(options, place, world, c.passes);
    run.train(options, strategy);
  };
  return run_and_compare(options, chapter);
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
    SCOPED_TRACE(testing::Message()
                 << "l " << c.l << " V " << c.vocabulary << " keep "
                 << c.keep_gathered << " m " << c.passes.micro_batches
                 << " recompute " << c.passes.recompute);
    const Report report =
        report_of(gpt_options(c.l * c.l * c.l, c.vocabulary, c.batch), c);
    expect_bill(report);
    expect_closed_form(report);
  }
}

TEST(CubeBill, HoldsInOtherPrecisionsAndWithDropout) {
  for (const DType dtype : {DType::kF64, DType::kBF16}) {
    for (const Case& c : {Case{2, 64, 24, true, {3, true}},
                          Case{2, 1001, 8, false}, Case{2, 64, 8}}) {
      Options options = gpt_options(8, c.vocabulary, c.batch);
      options.dtype = dtype;
      options.dropout = 0.1;
      SCOPED_TRACE(testing::Message()
                   << "keep " << c.keep_gathered << " " << dtype_name(dtype));
      const Report report = report_of(options, c);
      expect_bill(report);
      expect_closed_form(report);
    }
  }
}

// At the head, in f32; 40 tokens, 72 columns, 2048 classes on a rank. Kept: 16 * 72
// and statistics by each block, 2 * 72 and 2 by the last norm, the embedding's
// gathered table, the loss and its gradient. There: x and the table gathered, the
// logits' gradient, its part and gathered; dX and dW before their sums, dX after.
TEST(CubeBill, ThePeakIsAtTheHead) {
  const Report report = report_of(gpt_options(8, 4096, 8), {2, 0, 0, false});
  const double x = 40 * 72, table = 2048 * 72, logits = 40 * 2048;
  const double kept = 2 * (16 * x + 40 * 10) + 2 * x + 40 * 2 + table + 2;
  EXPECT_EQ(activation_peak(report.ranks[0]),
            4 * (kept + 2 * x + table + 3 * logits + 2 * x + table + x));
}

}  // namespace
}  // namespace shardbook::textbook::cube_bill
