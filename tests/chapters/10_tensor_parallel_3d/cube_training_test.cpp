// Whole runs on squares and cubes: every claim holds.

#include <gtest/gtest.h>

#include <string>

#include "tests/chapters/08_tensor_parallel_2d/bill_support.h"
#include "tests/chapters/10_tensor_parallel_3d/cube_support.h"
#include "tests/support/errors.h"

namespace shardbook::sharded_test {
namespace {

using cube_test::trained_on_cube;
using textbook::on_squares;

// Clipping needs the norm of the whole model, with each part counted once.
TEST(DimensionsTraining, EqualsOneDevice) {
  Options options = small_gpt(1);
  options.dropout = 0.1;
  options.clip = 0.05;
  expect_claims(on_squares(options, 2, 1), "");
  expect_claims(on_squares(options, 2, 2), "");
  expect_claims(trained_on_cube(options, 2), "");
  Options f32 = small_gpt(1, DType::kF32);
  f32.steps = 10;
  expect_claims(on_squares(f32, 2, 2), "");
  expect_claims(trained_on_cube(f32, 2, /*keep_gathered=*/false), "");
}

TEST(DimensionsTraining, ALlamaEqualsOneDeviceOnACube) {
  for (const std::string family : {"llama", "qwen3"}) {
    for (const bool keep_gathered : {true, false}) {
      Options options = textbook::odd_llama(family);
      options.clip = 0.05;
      expect_claims(trained_on_cube(options, 2, keep_gathered), family);
      expect_claims(trained_on_cube(options, 2, keep_gathered, {2, true}),
                    family + " in micro-batches");
    }
  }
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

// Recomputed blocks draw their masks again, at the micro-batch's positions.
TEST(DimensionsTraining, EqualsOneDeviceInMicroBatchesComputedAgain) {
  Options options = small_gpt(1);
  options.dropout = 0.2;
  options.batch = 16;
  const Passes passes{2, true};
  expect_claims(on_squares(options, 2, 1, passes), "");
  expect_claims(on_squares(options, 2, 2, passes), "");
  expect_claims(trained_on_cube(options, 2, true, passes), "");
  expect_claims(trained_on_cube(options, 2, false, passes), "");
}

// Row cuts must keep sequences whole: l^2 parts of the batch.
TEST(DimensionsTraining, RefusesABatchThatRanksCannotShare) {
  Options options = small_gpt(1);
  options.batch = 6;
  const Passes passes{2, false};
  expect_error([&] { on_squares(options, 2, 1, passes); },
               {"--batch 6: micro-batches and ranks cut it into 4 parts; give "
                "8"});
  expect_error([&] { trained_on_cube(options, 2); },
               {"--batch 6: the batch is cut into 4 parts; give 8"});
}

}  // namespace
}  // namespace shardbook::sharded_test
