// Closed forms of a step against the virtual clock: one device, its copies, and
// model parallelism.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdint>

#include "tests/chapters/common/textbook_support.h"

namespace shardbook::textbook {
namespace {

constexpr const char* kGpt =
    R"('{"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64}')";

class Textbook : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Textbook, ::testing::Values(1, 2, 4, 8));

// --- One device --------------------------------------------------------------

// 6 flops for each weight and token, however the batch is cut.
TEST_P(Textbook, OneDeviceTakesSixFlopsPerWeightAndToken) {
  const Report report = on_textbook(fmt::format(
      "00_single_device --batch 800 --micro-batches {}", GetParam()));
  expect_time(report.time.step_s, 6 * kLayers * kWeights * 800 * 64 / kRate);
  expect_closed_form(report);
}

TEST(TextbookOfOne, AttentionAndRecomputationCount) {
  for (const char* recompute : {"", "--recompute"}) {
    for (const char* more :
         {"", "--dropout 0.1 --dtype bf16 --micro-batches 5"}) {
      expect_closed_form(
          fmt::format("00_single_device --model {} --batch 24 {} {}", kGpt,
                      recompute, more));
    }
  }
}

TEST(TextbookOfOne, OtherClustersAndImagesHaveNoForm) {
  expect_no_form("00_single_device --batch 8 --cluster dgx-a100");
  expect_no_form("00_single_device --batch 8 --model resnet18 --image-size 32");
}

// --- DDP ---------------------------------------------------------------------

// F + B + c: one bucket, sent when all gradients are ready.
TEST_P(Textbook, DdpWithOneBucketHidesNothing) {
  const int n = GetParam();
  const Report report =
      on_textbook(fmt::format("02_ddp --world-size {} --batch 80000 "
                              "--first-bucket-mb 1000 --bucket-mb 1000",
                              n));
  const double f = layer_forward_s(80000.0 * 64 / n);
  expect_time(report.time.step_s,
              3 * kLayers * f + all_reduce(n, 4 * kParameters));
  expect_closed_form(report);
}

// Buckets of a layer, of parts of a block, and of single parameters; messages
// that are shorter and longer than the backward beside them.
TEST_P(Textbook, DdpHidesWhatBackwardLeavesTimeFor) {
  for (const double bucket_mb : {0.01, 0.03, 4 * kWeights / (1 << 20), 0.1}) {
    for (const std::int64_t batch : {800, 8000, 80000}) {
      for (const char* model : {"mlp", kGpt}) {
        expect_closed_form(
            fmt::format("02_ddp --world-size {0} --batch {1} --model {2} "
                        "--first-bucket-mb {3} --bucket-mb {3}",
                        GetParam(), batch, model, bucket_mb));
      }
    }
  }
}

TEST(TextbookDdp, EveryOptionOfTheReducerHasItsForm) {
  for (const int steps : {1, 2, 3}) {
    for (const char* unused :
         {"", "--find-unused-parameters --comm-hook bf16"}) {
      for (const char* is_static : {"", "--static-graph"}) {
        // Sends at the end of backward
        if (steps == 1 && is_static[0] != '\0') continue;
        expect_closed_form(fmt::format(
            "02_ddp --world-size 3 --batch 1800 --model {0} --steps {1} "
            "--micro-batches {1} --first-bucket-mb 0.05 --bucket-mb 0.05 "
            "{2} {3}",
            kGpt, steps, unused, is_static));
      }
    }
  }
}

// --- Devices of one process --------------------------------------------------

TEST_P(Textbook, DataParallelSendsEverythingThroughOneDevice) {
  const int n = GetParam();
  expect_closed_form(
      fmt::format("01_data_parallel --world-size {} --batch 80000", n));
  expect_closed_form(
      fmt::format("01_data_parallel --world-size {} --batch 24 --model {} "
                  "--dtype bf16",
                  n, kGpt));
}

TEST(TextbookOfTwo, DataParallelNeedsEqualPartsAndOneMessage) {
  expect_no_form("01_data_parallel --world-size 2 --batch 7");
  // 25 MB of parameters are three messages
  expect_no_form(
      R"(01_data_parallel --world-size 2 --batch 8 --model '{"n_embd": 512,
         "n_layer": 2, "n_head": 4, "n_positions": 64}')");
}

// Naive: F + B, and a copy each way. With splits, one device works on a split
// while the other works on the next; either may be the slower one.
TEST(TextbookOfTwo, ModelParallelismComputesOneHalfAfterTheOther) {
  for (const int splits : {1, 4, 8}) {
    for (const char* partition : {"half", "1,3", "3,1"}) {
      expect_closed_form(fmt::format(
          "04_model_parallel --batch 80000 --variant {} --split-size {} "
          "--partition {}",
          splits == 1 ? "model_parallel" : "pipeline", 80000 / splits,
          partition));
    }
  }
}

// Odd sides round up; a bottleneck's stride is in its second convolution.
TEST(TextbookOfTwo, ConvolutionsCountForEveryPixelTheyMake) {
  for (const char* model : {"resnet18", "resnet50"}) {
    for (const std::int64_t side : {64, 75}) {
      const auto line = [&](const char* variant) {
        return fmt::format(
            "04_model_parallel --batch 24 --model {} --image-size {} --seq 1 "
            "--variant {}",
            model, side, variant);
      };
      expect_closed_form(line("pipeline --split-size 6"));
      expect_closed_form(line("single"));
      expect_no_form(line("pipeline --split-size 7"));
    }
  }
}

}  // namespace
}  // namespace shardbook::textbook
