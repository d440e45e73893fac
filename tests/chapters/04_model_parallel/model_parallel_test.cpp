// Two halves on two devices give the numbers of one device; and the traps.

#include "chapters/04_model_parallel/model_parallel.h"

#include <gtest/gtest.h>

#include <cmath>

#include "chapters/common/models/resnet.h"
#include "chapters/common/toy.h"
#include "core/check.h"
#include "core/ops.h"
#include "tests/chapters/04_model_parallel/model_parallel_support.h"
#include "tests/support/errors.h"
#include "tests/support/sanitized.h"

namespace shardbook::model_parallel {
namespace {

using namespace test;

/// The model of the tutorial.
std::unique_ptr<LayerList> toy_layers() {
  toy::Torch torch(0);
  toy::Net net;
  net.add("net1", torch.linear("net1", 10, 10));
  net.add("relu", Relu());
  net.add("net2", torch.linear("net2", 10, 5));
  return std::make_unique<toy::Net>(net);
}

// --- Pure functions ----------------------------------------------------------

TEST(ModelParallelSplits, AreOfOneSizeAndTheLastIsShort) {
  using Ranges = std::vector<RowRange>;
  EXPECT_EQ(fixed_splits(120, 20).size(), 6u);
  EXPECT_EQ(fixed_splits(5, 2), (Ranges{{0, 2}, {2, 4}, {4, 5}}));
  EXPECT_EQ(fixed_splits(120, 50), (Ranges{{0, 50}, {50, 100}, {100, 120}}));
  EXPECT_EQ(fixed_splits(3, 100), (Ranges{{0, 3}}));
  EXPECT_EQ(fixed_splits(0, 4), (Ranges{{0, 0}}));
  EXPECT_THROW(fixed_splits(3, 0), Error);
}

TEST(ModelParallelCut, IsBehindLayerTwo) {
  for (const std::string name : {"resnet18", "resnet50"}) {
    const ModelConfig config = ModelConfig::read(name);
    const auto layers = layers_of(config);
    const int cut = half_of(config);
    EXPECT_EQ(layers->name(cut), "layer3.0") << name;
    EXPECT_EQ(layers->name(cut - 1).substr(0, 6), "layer2") << name;
  }
}

int cut_of_resnet50(const std::string& partition, std::int64_t split_size,
                    const std::string& cluster = "textbook") {
  Options options = tiny_options();
  options.model = "resnet50";
  options.batch = 24;
  options.image_size = 128;
  options.cluster = cluster;
  const Settings settings = {.split_size = split_size, .partition = partition};
  return cut_of(options, settings, *layers_of(model_config(options)));
}

TEST(ModelParallelCut, IsWhereThePartitionSays) {
  EXPECT_EQ(cut_of_resnet50("half", 6), 8);
  EXPECT_EQ(cut_of_resnet50("uniform", 6), 9);
  EXPECT_EQ(cut_of_resnet50("11,7", 6), 11);
  EXPECT_EQ(error_of([] { cut_of_resnet50("9,10", 6); }),
            "--partition 9,10: adds up to 19 layers; resnet50 has 18 "
            "layers: stem, 16 blocks and head; give a list such as 9,9");
  expect_text(error_of([] { cut_of_resnet50("time", 6, "none"); }), {"none"});
}

// On a V100 each operation on one image takes as long as its launch, so layers
// count (most of the 18 are behind layer2); on all images arithmetic counts.
TEST(ModelParallelCut, ByTimeIsThatOfOneSplit) {
  EXPECT_GT(cut_of_resnet50("time", 1, "dgx-v100"),
            cut_of_resnet50("time", 24, "dgx-v100"));
}

TEST(ModelParallelCut, LeavesEachDeviceItsLayers) {
  const auto layers = toy_layers();
  const Device a = Device::cpu(0), b = Device::cpu(1);
  for (const int cut : {-1, 0, 3, 4}) {
    EXPECT_THROW(ModelParallel(*layers, cut, {a, b}, {}), Error) << cut;
  }
  EXPECT_THROW(ModelParallel(*layers, 1, {a}, {}), Error);
  EXPECT_THROW(ModelParallel(*layers, 1, {a, a}, {}), Error);
  EXPECT_THROW(PipelineParallel(*layers, 1, {a, b}, {}, 0), Error);
  // GPT's token embedding is also its last layer.
  const auto gpt = layers_of(ModelConfig::read("gpt-nano"));
  expect_text(error_of([&] {
                ModelParallel(*gpt, 3, {a, b}, {});
              }),
              {"both sides of the cut"});
}

// --- Numbers -----------------------------------------------------------------

class ModelParallelParity : public ::testing::TestWithParam<DType> {};

TEST_P(ModelParallelParity, NaiveHasTheBitsOfOneDevice) {
  const Options options = tiny_options(GetParam());
  expect_same_bits(run(options, {.variant = "model_parallel"}),
                   run(options, {.variant = "single", .split_size = 0}));
}

TEST_P(ModelParallelParity, PipelinedHasTheBitsOfOneDeviceOverTheSameSplits) {
  const Options options = tiny_options(GetParam());
  // 10 rows: 2 2 2 2 2, 3 3 3 1, 4 4 2, all at once; and other cuts
  for (const Settings& settings :
       sized<Settings>({{.split_size = 2},
                        {.split_size = 3},
                        {.split_size = 4},
                        {.split_size = 50},
                        {.split_size = 3, .partition = "1,5"},
                        {.split_size = 3, .partition = "5,1"}},
                       {{.split_size = 3, .partition = "1,5"}})) {
    SCOPED_TRACE(settings.partition + " " +
                 std::to_string(settings.split_size));
    expect_same_bits(run(options, settings),
                     run(options, on_one_device(settings)));
  }
}

INSTANTIATE_TEST_SUITE_P(
    DTypes, ModelParallelParity,
    ::testing::ValuesIn(sized<DType>({DType::kF32, DType::kF64},
                                     {DType::kF32})),
    [](const auto& info) { return std::string(dtype_name(info.param)); });

TEST(ModelParallelBatchNorm, RunningStatisticsAreUpdatedOncePerSplit) {
  // Two splits with the same images: each update moves a running mean by a
  // tenth of the way, so 0.9^n of the way remains after n updates.
  const auto layers = resnet_layers(ModelConfig::read(kTiny));
  const TwoDevices two;
  InitOptions init;
  init.dtype = DType::kF64;
  const Tensor half = Tensor::empty({3, 3, 32, 32}, {DType::kF64, two.all[0]});
  fill_normal(half, 1, 2, 0.5, 1);
  for (const int num_splits : {1, 2, 6}) {
    Tensors same(static_cast<std::size_t>(num_splits), half);
    PipelineParallel model(*layers, 3, two.all, init, 3);
    model(concat(same, 0));
    const Tensor mean = model.half(0).named_buffers()[0].tensor;
    PipelineParallel once(*layers, 3, two.all, init, 3);
    once(half);
    const Tensor first = once.half(0).named_buffers()[0].tensor;
    const double expected =
        (1 - std::pow(0.9, num_splits)) / 0.1 * first.to_vector<double>()[0];
    EXPECT_NEAR(mean.to_vector<double>()[0], expected, 1e-12) << num_splits;
  }
}

TEST(ModelParallelToy, PipelinedOutputsAreBitsAndGradientsSums) {
  const TwoDevices two;
  InitOptions init;
  init.seed = 3;
  const auto layers = toy_layers();
  const Tensor x = Tensor::empty({20, 10}), y = Tensor::empty({20, 5});
  fill_normal(x, 1, 1, 0, 1);
  fill_normal(y, 1, 2, 0, 1);

  Stage one(*layers, 0, 3, init);
  const Tensor expected = one(x);
  mse_loss(expected, y).backward();
  for (const std::int64_t split : {1, 3, 7, 20}) {
    SCOPED_TRACE(split);
    PipelineParallel model(*layers, 1, two.all, init, split);
    const Tensor output = model(x);
    EXPECT_EQ(output.device(), two.all[1]);
    EXPECT_TRUE(bitwise_equal(output, expected));
    mse_loss(output, to_device(y, output.device())).backward();
    const auto mine = model.named_parameters();
    const auto theirs = one.named_parameters();
    ASSERT_EQ(mine.size(), 4u);
    for (std::size_t i = 0; i < mine.size(); ++i) {
      EXPECT_EQ(mine[i].name, theirs[i].name);
      // Each gradient is on its parameter's device, summed split by split.
      EXPECT_EQ(mine[i].tensor.grad().device(), two.all[i / 2]);
      EXPECT_LT(
          relative_difference(mine[i].tensor.grad(), theirs[i].tensor.grad()),
          1e-6);
      if (split == 20) {
        EXPECT_TRUE(
            bitwise_equal(mine[i].tensor.grad(), theirs[i].tensor.grad()));
      }
    }
  }
}

TEST(ModelParallelTraining, ClippingUsesTheNormOfBothHalves) {
  Options options = tiny_options(DType::kF64);
  options.clip = 0.05;
  const Outcome two = run(options, {.variant = "model_parallel"});
  const Outcome one = run(options, {.variant = "single", .split_size = 0});
  for (const NamedTensor& each : two.values) {
    EXPECT_LT(relative_difference(each.tensor, find(one, each.name).tensor),
              1e-12)
        << each.name;
  }
  options.clip = 0;
  const Outcome free = run(options, {.variant = "model_parallel"});
  EXPECT_GT(relative_difference(find(two, "fc.weight").tensor,
                                find(free, "fc.weight").tensor),
            1e-6);
}

// --- Traps -------------------------------------------------------------------

TEST(ModelParallelTrap, WhatADeviceThrowsArrivesAndTheNextForwardWorks) {
  const TwoDevices two;
  PipelineParallel model(*toy_layers(), 1, two.all, {}, 2);
  expect_error([&] { model(Tensor::zeros({6, 11})); }, {"11"});
  EXPECT_EQ(model(Tensor::zeros({6, 10})).shape(), (Shape{6, 5}));
}

}  // namespace
}  // namespace shardbook::model_parallel
