// Whole runs on squares and cubes: every claim holds.

#include <gtest/gtest.h>

#include <string>

#include "chapters/08_tensor_parallel_2d/summa_strategy.h"
#include "chapters/10_tensor_parallel_3d/cube_strategy.h"
#include "tests/chapters/common/sharded_support.h"
#include "tests/support/errors.h"

namespace shardbook::sharded_test {
namespace {

/// Trains on d squares of side q, and compares with one device.
Report on_squares(Options options, int q, int d, const Passes& passes = {}) {
  options.world_size = d * q * q;
  ChapterRun chapter;
  chapter.rank = [&](const Options& options, ProcessGroup& world, Run& run) {
    DeviceMesh mesh(world, d == 1 ? summa::square(q)
                                  : Topology({"dep", "col", "row"}, {d, q, q}));
    summa::SummaStrategy strategy(options, summa::grid_of(mesh), world, passes);
    run.train(options, strategy);
  };
  chapter.reference = [&](const Options& options) {
    return train_one_device(options, passes.micro_batches);
  };
  return run_and_compare(options, chapter);
}

Report on_cube(Options options, int l, bool keep_gathered = true,
               const Passes& passes = {}) {
  options.world_size = l * l * l;
  ChapterRun chapter;
  chapter.rank = [&](const Options& options, ProcessGroup& world, Run& run) {
    DeviceMesh mesh(world, cube::cube_of(l));
    cube::Cube place = cube::cube_on(mesh);
    place.keep_gathered = keep_gathered;
    cube::CubeStrategy strategy(options, place, world, passes);
    run.train(options, strategy);
  };
  chapter.reference = [&](const Options& options) {
    return train_one_device(options, passes.micro_batches);
  };
  return run_and_compare(options, chapter);
}

// Clipping needs the norm of the whole model: each part counted once.
TEST(DimensionsTraining, EqualsOneDevice) {
  Options options = small_gpt(1);
  options.dropout = 0.1;
  options.clip = 0.05;
  expect_claims(on_squares(options, 2, 1), "");
  expect_claims(on_squares(options, 2, 2), "");
  expect_claims(on_cube(options, 2), "");
  Options f32 = small_gpt(1, DType::kF32);
  f32.steps = 10;
  expect_claims(on_squares(f32, 2, 2), "");
  expect_claims(on_cube(f32, 2, /*keep_gathered=*/false), "");
}

TEST(DimensionsTraining, TenStepsOfBothOptimizersOnSquares) {
  for (const DType dtype : {DType::kF64, DType::kF32}) {
    for (const int depth : {1, 2}) {
      Options options = small_gpt(1, dtype);
      options.steps = 10;
      options.optimizer = "sgd";
      options.optimizer_options.momentum = 0.9;
      expect_claims(on_squares(options, 2, depth), "");
      if (dtype == DType::kF32 && depth == 2) continue;  // above
      options.optimizer = "adamw";
      expect_claims(on_squares(options, 2, depth), "");
    }
  }
}

// Blocks that are computed again draw their masks again, at the positions of the
// micro-batch.
TEST(DimensionsTraining, EqualsOneDeviceInMicroBatchesComputedAgain) {
  Options options = small_gpt(1);
  options.dropout = 0.2;
  options.batch = 16;
  const Passes passes{2, true};
  expect_claims(on_squares(options, 2, 1, passes), "");
  expect_claims(on_squares(options, 2, 2, passes), "");
  expect_claims(on_cube(options, 2, true, passes), "");
  expect_claims(on_cube(options, 2, false, passes), "");
}

TEST(DimensionsTraining, RefusesMicroBatchesThatRanksCannotShare) {
  Options options = small_gpt(1);
  options.batch = 6;
  expect_error(
      [&] {
        on_squares(options, 2, 1, Passes{2, false});
      },
      {"--batch 6: micro-batches and ranks cut it into 4 "
       "parts; give 8"});
}

// Rows must contain whole sequences: l^2 parts of the batch.
TEST(DimensionsTraining, RefusesABatchThatACubeCannotShare) {
  Options options = small_gpt(1);
  options.batch = 6;
  expect_error([&] { on_cube(options, 2); },
               {"--batch 6: the batch is cut into 4 parts; give 8"});
}

}  // namespace
}  // namespace shardbook::sharded_test
