// The experiment of PyTorch's tutorial: one device, two in turn, all splits.

#include "chapters/04_model_parallel/split_sweep.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/chapters/04_model_parallel/model_parallel_support.h"

namespace shardbook::model_parallel {
namespace {

using namespace test;

TEST(ModelParallelSweep, SplitSizesAreNumbersFromOneUp) {
  EXPECT_EQ(split_sizes("1,3,5"), (std::vector<std::int64_t>{1, 3, 5}));
  EXPECT_EQ(split_sizes("60"), (std::vector<std::int64_t>{60}));
  for (const char* bad : {"", "0", "1,", ",2", "2,-3", "a", "1.5", "1, 2"}) {
    expect_error([&] { split_sizes(bad); }, {"--sweep"});
  }
}

// The model that `./shardbook run` trains: small enough to be quick, large
// enough to show the U on devices as fast as the tutorial's.
TEST(ModelParallelSweep, AModelThatTrainsInSecondsShowsTheLesson) {
  Options options = tiny_options();
  options.backend = "sim";
  options.cluster = "k80-pcie";
  options.model = R"({"model_type": "resnet", "embedding_size": 32,
      "depths": [2, 2]})";
  options.batch = 24;
  options.image_size = 96;
  const Sweep sweep = run_sweep(options, {}, {1, 2, 4, 8, 12}, 1);
  EXPECT_GT(sweep.naive.virtual_s, sweep.single.virtual_s);
  EXPECT_GT(sweep.pipelined.front().virtual_s, sweep.naive.virtual_s);
  EXPECT_EQ(sweep.best().settings.split_size, 8);
  EXPECT_LT(sweep.best().virtual_s, 0.9 * sweep.single.virtual_s);
  EXPECT_GT(sweep.pipelined.back().virtual_s, sweep.best().virtual_s);
  const Sweep three = run_sweep(options, {}, {8}, 1, /*batches=*/3);
  EXPECT_DOUBLE_EQ(three.naive.virtual_s, 3 * sweep.naive.virtual_s);
}

TEST(ModelParallelSweep, WallTimesLeaveOutTheWarmUp) {
  StepTime time;
  set_wall_times({90, 1, 2, 6}, time);
  EXPECT_DOUBLE_EQ(time.mean_s, 3);
  EXPECT_DOUBLE_EQ(time.sd_s, std::sqrt((4 + 1 + 9) / 2.0));
  EXPECT_DOUBLE_EQ(time.fastest_s, 1);
  set_wall_times({90, 4}, time);
  EXPECT_DOUBLE_EQ(time.mean_s, 4);
  EXPECT_EQ(time.sd_s, 0);
  EXPECT_THROW(set_wall_times({90}, time), Error);
}

TEST(ModelParallelSweep, TheBestIsTheFastest) {
  Sweep sweep;
  for (const double seconds : {3.0, 1.0, 2.0}) {
    StepTime time;
    time.settings.split_size = static_cast<std::int64_t>(seconds);
    time.virtual_s = seconds;
    sweep.pipelined.push_back(time);
  }
  EXPECT_EQ(sweep.best().settings.split_size, 1);
  // Measured times take precedence over virtual ones
  for (StepTime& time : sweep.pipelined) time.mean_s = 10 - time.virtual_s;
  EXPECT_EQ(sweep.best().settings.split_size, 3);
}

TEST(ModelParallelSweep, MeasuresEveryVariantOnThreads) {
  Options options = tiny_options();
  const Sweep sweep = run_sweep(options, {}, {2, 5}, /*repeats=*/3);
  EXPECT_EQ(sweep.repeats, 3);
  for (const StepTime* time : {&sweep.single, &sweep.naive, &sweep.pipelined[0],
                               &sweep.pipelined[1]}) {
    EXPECT_GT(time->fastest_s, 0);
    EXPECT_GE(time->mean_s, time->fastest_s);
    EXPECT_GE(time->sd_s, 0);
    EXPECT_LT(time->virtual_s, 0) << "--cluster none";
  }
  expect_text(sweep_text(sweep), {"splits of 5"});
  expect_text(sweep_json(sweep), {"\"split_size\":5"});
}

}  // namespace
}  // namespace shardbook::model_parallel
