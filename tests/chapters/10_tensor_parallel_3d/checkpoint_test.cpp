// Whole runs on squares and cubes: numbers equal to one device, and checkpoints
// that move between them.

#include <gtest/gtest.h>

#include <string>

#include "chapters/08_tensor_parallel_2d/trainer.h"
#include "chapters/10_tensor_parallel_3d/trainer.h"
#include "tests/chapters/common/sharded_support.h"
#include "tests/support/temp_folder.h"

namespace shardbook::sharded_test {
namespace {

/// Trains on d squares of side q, and compares with one device.
Report on_squares(Options options, int q, int d, const Passes& passes = {}) {
  options.world_size = d * q * q;
  ChapterRun chapter;
  chapter.rank = [&](const Options& as, ProcessGroup& world, Run& run) {
    DeviceMesh mesh(world, d == 1 ? summa::square(q)
                                  : Topology({"dep", "col", "row"}, {d, q, q}));
    summa::Trainer strategy(as, summa::grid_of(mesh), world, passes);
    run.train(as, strategy);
  };
  chapter.reference = [&](const Options& as) {
    return train_one_device(as, passes.micro_batches);
  };
  return run_and_compare(options, chapter);
}

Report on_cube(Options options, int l, bool keep_gathered = true,
               const Passes& passes = {}) {
  options.world_size = l * l * l;
  ChapterRun chapter;
  chapter.rank = [&](const Options& as, ProcessGroup& world, Run& run) {
    DeviceMesh mesh(world, cube::cube_of(l));
    cube::Cube place = cube::cube_on(mesh);
    place.keep_gathered = keep_gathered;
    cube::Trainer strategy(as, place, world, passes);
    run.train(as, strategy);
  };
  chapter.reference = [&](const Options& as) {
    return train_one_device(as, passes.micro_batches);
  };
  return run_and_compare(options, chapter);
}

void expect_equal_to_one_device(const Report& report) {
  EXPECT_TRUE(report.parity.checked);
  EXPECT_TRUE(report.parity.passed)
      << report.parity.max_rel << " beside " << report.parity.tolerance;
  for (const RankReport& rank : report.ranks) {
    EXPECT_NEAR(rank.bytes.predicted, rank.bytes.counted,
                1e-9 * rank.bytes.counted);
  }
}

// Clipping needs the norm of the whole model: each part counted once.
TEST(DimensionsTraining, EqualsOneDevice) {
  Options options = small_gpt(1);
  options.dropout = 0.1;
  options.clip = 0.05;
  expect_equal_to_one_device(on_squares(options, 2, 1));
  expect_equal_to_one_device(on_squares(options, 2, 2));
  expect_equal_to_one_device(on_cube(options, 2));
  Options f32 = small_gpt(1, DType::kF32);
  f32.steps = 10;
  expect_equal_to_one_device(on_squares(f32, 2, 2));
  expect_equal_to_one_device(on_cube(f32, 2, /*keep_gathered=*/false));
}

TEST(DimensionsTraining, TenStepsOfBothOptimizersOnSquares) {
  for (const DType dtype : {DType::kF64, DType::kF32}) {
    for (const int depth : {1, 2}) {
      Options options = small_gpt(1, dtype);
      options.steps = 10;
      options.optimizer = "sgd";
      options.optimizer_options.momentum = 0.9;
      expect_equal_to_one_device(on_squares(options, 2, depth));
      if (dtype == DType::kF32 && depth == 2) continue;  // above
      options.optimizer = "adamw";
      expect_equal_to_one_device(on_squares(options, 2, depth));
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
  expect_equal_to_one_device(on_squares(options, 2, 1, passes));
  expect_equal_to_one_device(on_squares(options, 2, 2, passes));
  expect_equal_to_one_device(on_cube(options, 2, true, passes));
  expect_equal_to_one_device(on_cube(options, 2, false, passes));
}

TEST(DimensionsTraining, RefusesMicroBatchesThatRanksCannotShare) {
  Options options = small_gpt(1);
  options.batch = 6;
  try {
    on_squares(options, 2, 1, Passes{2, false});
    ADD_FAILURE() << "trained";
  } catch (const Error& refused) {
    EXPECT_NE(std::string(refused.what())
                  .find("--batch 6: micro-batches and ranks cut it into 4 "
                        "parts; give 8"),
              std::string::npos)
        << refused.what();
  }
}

// Rows must contain whole sequences: l^2 parts of the batch.
TEST(DimensionsTraining, RefusesABatchThatACubeCannotShare) {
  Options options = small_gpt(1);
  options.batch = 6;
  try {
    on_cube(options, 2);
    ADD_FAILURE() << "trained";
  } catch (const Error& refused) {
    EXPECT_NE(std::string(refused.what())
                  .find("--batch 6: the batch is cut into 4 parts; give 8"),
              std::string::npos)
        << refused.what();
  }
}

// [BIT] Square, squares with a depth, cube, one device.
TEST(DimensionsCheckpoints, MoveBetweenSquaresAndCubes) {
  const TempFolder folder;
  const auto file = [&](const char* name) { return folder / name; };
  Options options = small_gpt(1, DType::kF32);
  options.save = file("square");
  on_squares(options, 2, 1);
  options.steps = 0;
  options.load = file("square"), options.save = file("cube");
  on_cube(options, 2);
  options.load = file("cube"), options.save = file("squares");
  on_squares(options, 2, 2);
  const auto loaded = [&](const char* name) {
    Options one = small_gpt(1, DType::kF32);
    one.load = file(name);
    return build_model(one);
  };
  const LoadedModel first = loaded("square");
  for (const char* name : {"cube", "squares"}) {
    const LoadedModel moved = loaded(name);
    const auto mine = first.model->named_parameters();
    const auto theirs = moved.model->named_parameters();
    ASSERT_EQ(mine.size(), theirs.size());
    for (std::size_t i = 0; i < mine.size(); ++i) {
      EXPECT_TRUE(bitwise_equal(mine[i].tensor, theirs[i].tensor))
          << name << ": " << mine[i].name;
    }
  }
}

}  // namespace
}  // namespace shardbook::sharded_test
