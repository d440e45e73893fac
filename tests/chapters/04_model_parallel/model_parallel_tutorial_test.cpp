// The sweep of PyTorch's tutorial at the tutorial's sizes, on shapes.

#include <gtest/gtest.h>

#include "chapters/04_model_parallel/split_sweep.h"
#include "tests/chapters/04_model_parallel/model_parallel_support.h"

namespace shardbook::model_parallel {
namespace {

using namespace test;

TEST(ModelParallelTutorial, TimesHaveABottomBetweenSmallAndLarge) {
  Options options = tiny_options();
  options.backend = "sim";
  options.cluster = "kaggle-t4x2";
  options.model = "resnet50";
  options.batch = 120;
  options.image_size = 128;
  const Sweep sweep =
      run_sweep(options, {}, {1, 3, 5, 8, 10, 12, 20, 40, 60}, 1);
  EXPECT_GT(sweep.naive.virtual_s, sweep.single.virtual_s);
  const StepTime& best = sweep.best();
  EXPECT_GT(best.settings.split_size, 5);
  EXPECT_LT(best.settings.split_size, 60);
  EXPECT_LT(best.virtual_s, 0.75 * sweep.single.virtual_s);
  EXPECT_GT(sweep.pipelined.front().virtual_s, sweep.naive.virtual_s);
}

}  // namespace
}  // namespace shardbook::model_parallel
