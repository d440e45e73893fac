// Closed forms of a step against the virtual clock: one device, its copies, and
// model parallelism.

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "chapters/00_single_device/single_device.h"
#include "chapters/01_data_parallel/data_parallel_strategy.h"
#include "chapters/02_ddp/ddp_strategy.h"
#include "chapters/04_model_parallel/model_parallel_strategy.h"
#include "tests/chapters/common/textbook_support.h"

namespace shardbook::textbook {
namespace {

constexpr const char* kGpt =
    R"({"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64})";

Options gpt_options(int world_size, std::int64_t batch) {
  Options options = mlp_options(world_size, batch);
  options.model = kGpt;
  return options;
}

/// `train(options, devices, run)` on devices of one process.
template <typename Train>
Report run_devices(const Options& options, const Train& train) {
  ChapterRun chapter;
  chapter.devices = train;
  return run_and_compare(options, chapter);
}

class Textbook : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Textbook, ::testing::Values(1, 2, 4, 8));

// --- One device --------------------------------------------------------------

Report one_device(const Options& options,
                  const single_device::SingleDeviceOptions& setup) {
  ChapterRun chapter;
  chapter.rank = [&](const Options& options, ProcessGroup&, Run& run) {
    single_device::SingleDevice device(options, setup);
    run.train(options, device);
  };
  return run_and_compare(options, chapter);
}

// 6 flops for each weight and token, however the batch is cut.
TEST_P(Textbook, OneDeviceTakesSixFlopsPerWeightAndToken) {
  single_device::SingleDeviceOptions setup;
  setup.num_micro_batches = GetParam();
  const Report report = one_device(mlp_options(1, 800), setup);
  expect_time(report.time.step_s, 6 * kLayers * kWeights * 800 * 64 / kRate);
  expect_closed_form(report);
}

TEST(TextbookOfOne, AttentionAndRecomputationCount) {
  for (const bool recompute : {false, true}) {
    single_device::SingleDeviceOptions setup;
    setup.recompute = recompute;
    Options options = gpt_options(1, 24);
    expect_closed_form(one_device(options, setup));
    options.dropout = 0.1;
    options.dtype = DType::kBF16;
    setup.num_micro_batches = 5;
    expect_closed_form(one_device(options, setup));
  }
}

TEST(TextbookOfOne, OtherClustersAndImagesHaveNoForm) {
  Options options = mlp_options(1, 8);
  options.cluster = "dgx-a100";
  EXPECT_EQ(one_device(options, {}).time.closed_form_s, kNotPredicted);
  options = mlp_options(1, 8);
  options.model = "resnet18";
  options.image_size = 32;
  EXPECT_EQ(one_device(options, {}).time.closed_form_s, kNotPredicted);
}

// --- DDP ---------------------------------------------------------------------

// F + B + c: one bucket, sent when all gradients are ready.
TEST_P(Textbook, DdpWithOneBucketHidesNothing) {
  const int n = GetParam();
  const Options options = mlp_options(n, 80000);
  ddp::StrategyOptions setup;
  setup.ddp.first_bucket_mb = setup.ddp.bucket_cap_mb = 1000;
  const Report report = run_on_textbook<ddp::DdpStrategy>(options, setup);
  const double f = layer_forward_s(80000.0 * 64 / n);
  expect_time(report.time.step_s,
              3 * kLayers * f + all_reduce(n, 4 * kParameters));
  expect_closed_form(report);
}

// Buckets of a layer, of parts of a block, and of single parameters; messages
// that are shorter and longer than the backward beside them.
TEST_P(Textbook, DdpHidesWhatBackwardLeavesTimeFor) {
  const int n = GetParam();
  for (const double bucket_mb : {0.01, 0.03, 4 * kWeights / (1 << 20), 0.1}) {
    for (const std::int64_t batch : {800, 8000, 80000}) {
      SCOPED_TRACE(std::to_string(bucket_mb) + " MiB, batch " +
                   std::to_string(batch));
      ddp::StrategyOptions setup;
      setup.ddp.first_bucket_mb = setup.ddp.bucket_cap_mb = bucket_mb;
      expect_closed_form(
          run_on_textbook<ddp::DdpStrategy>(mlp_options(n, batch), setup));
      expect_closed_form(
          run_on_textbook<ddp::DdpStrategy>(gpt_options(n, batch), setup));
    }
  }
}

TEST(TextbookDdp, EveryOptionOfTheReducerHasItsForm) {
  for (const std::int64_t steps : {1, 2, 3}) {
    for (const bool unused : {false, true}) {
      for (const bool is_static : {false, true}) {
        if (steps == 1 && is_static) continue;  // sends at the end of backward
        SCOPED_TRACE(testing::Message()
                     << steps << " steps " << unused << is_static);
        ddp::StrategyOptions setup;
        setup.ddp.first_bucket_mb = setup.ddp.bucket_cap_mb = 0.05;
        setup.ddp.find_unused_parameters = unused;
        setup.ddp.static_graph = is_static;
        setup.comm_hook = unused ? "bf16" : "none";
        setup.micro_batches = steps;
        Options options = gpt_options(3, 1800);
        options.steps = steps;
        expect_closed_form(run_on_textbook<ddp::DdpStrategy>(options, setup));
      }
    }
  }
}

// --- Devices of one process --------------------------------------------------

Report data_parallel_report(const Options& options) {
  return run_devices(options, [](const Options& options,
                                 const std::vector<Device>& devices, Run& run) {
    data_parallel::DataParallelStrategy strategy(options, devices);
    run.train(options, strategy);
  });
}

TEST_P(Textbook, DataParallelSendsEverythingThroughOneDevice) {
  const int n = GetParam();
  expect_closed_form(data_parallel_report(mlp_options(n, 80000)));
  Options options = gpt_options(n, 24);
  options.dtype = DType::kBF16;
  expect_closed_form(data_parallel_report(options));
}

TEST(TextbookOfTwo, DataParallelNeedsEqualPartsAndOneMessage) {
  EXPECT_EQ(data_parallel_report(mlp_options(2, 7)).time.closed_form_s,
            kNotPredicted);
  Options options = gpt_options(2, 8);
  options.model =
      R"({"n_embd": 512, "n_layer": 2, "n_head": 4, "n_positions": 64})";
  EXPECT_EQ(data_parallel_report(options).time.closed_form_s, kNotPredicted)
      << "25 MB of parameters are three messages";
}

Report model_parallel_report(const Options& options,
                             const model_parallel::Settings& settings) {
  Options on = options;
  on.world_size = settings.num_devices();
  return run_devices(on, [&](const Options& options,
                             const std::vector<Device>& devices, Run& run) {
    model_parallel::ModelParallelStrategy strategy(options, settings, devices,
                                                   1);
    run.train(options, strategy);
  });
}

// Naive: F + B, and a copy each way. With splits, one device works on a split
// while the other works on the next; either may be the slower one.
TEST(TextbookOfTwo, ModelParallelismComputesOneHalfAfterTheOther) {
  for (const int splits : {1, 4, 8}) {
    for (const char* partition : {"half", "1,3", "3,1"}) {
      SCOPED_TRACE(partition);
      model_parallel::Settings settings;
      settings.variant = splits == 1 ? "model_parallel" : "pipeline";
      settings.split_size = 80000 / splits;
      settings.partition = partition;
      settings.loss = "cross_entropy";
      expect_closed_form(
          model_parallel_report(mlp_options(2, 80000), settings));
    }
  }
}

// Odd sides round up; a bottleneck's stride is in its second convolution.
TEST(TextbookOfTwo, ConvolutionsCountForEveryPixelTheyMake) {
  for (const char* model : {"resnet18", "resnet50"}) {
    for (const std::int64_t side : {64, 75}) {
      SCOPED_TRACE(std::string(model) + ", " + std::to_string(side));
      Options options = mlp_options(2, 24);
      options.model = model;
      options.image_size = side;
      options.seq = 1;
      model_parallel::Settings settings;
      settings.split_size = 6;
      expect_closed_form(model_parallel_report(options, settings));
      settings.variant = "single";
      expect_closed_form(model_parallel_report(options, settings));
      settings.split_size = 7;
      EXPECT_EQ(model_parallel_report(options, settings).time.closed_form_s,
                kNotPredicted);
    }
  }
}

}  // namespace
}  // namespace shardbook::textbook
