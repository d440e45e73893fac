// Bytes that cross the boundary of two devices, and memory on each side.

#include "chapters/04_model_parallel/bill.h"

#include <gtest/gtest.h>

#include "chapters/04_model_parallel/model_parallel.h"
#include "chapters/common/models/resnet.h"
#include "tests/chapters/04_model_parallel/model_parallel_support.h"

namespace shardbook::model_parallel {
namespace {

using namespace test;

/// (label, numel) of each message of one device in one step of ResNet-50, batch
/// 120 of 3x128x128, on shapes.
using Sent = std::vector<std::pair<std::string, std::int64_t>>;
Sent sent_by(int device, const Settings& settings) {
  Options options = tiny_options();
  options.model = "resnet50";
  options.batch = 120;
  options.image_size = 128;
  const TwoDevices two(/*on_shapes=*/true);
  ModelParallelStrategy strategy(options, settings, two.all, 1);
  strategy.step(strategy.batch(0));
  Sent sent;
  for (const CommRecord& record :
       strategy.copies()->records(two.all[static_cast<std::size_t>(device)])) {
    if (record.numel_to_peers > 0)
      sent.emplace_back(record.label, record.numel);
  }
  return sent;
}

TEST(ModelParallelBill, NaiveSendsOneMessageEachWay) {
  const Settings naive = {.variant = "model_parallel"};
  EXPECT_EQ(sent_by(0, naive),
            (Sent{{"activations", 120 * 131072}, {"labels", 120}}));
  EXPECT_EQ(sent_by(1, naive), (Sent{{"gradients", 120 * 131072}}));
}

TEST(ModelParallelBill, PipelinedSendsSixMessagesEachWay) {
  const Settings pipeline = {.variant = "pipeline", .split_size = 20};
  Sent forward(6, {"activations", 20 * 131072});
  forward.emplace_back("labels", 120);
  EXPECT_EQ(sent_by(0, pipeline), forward);
  EXPECT_EQ(sent_by(1, pipeline), Sent(6, {"gradients", 20 * 131072}));
  // 50, 50 and 20 images, sent in reverse
  EXPECT_EQ(sent_by(1, {.variant = "pipeline", .split_size = 50}),
            (Sent{{"gradients", 20 * 131072},
                  {"gradients", 50 * 131072},
                  {"gradients", 50 * 131072}}));
}

TEST(ModelParallelBill, TrafficIsTheBoundaryOfTheBatch) {
  struct Case {
    std::int64_t split;
    std::string partition;
    double numel;  // of one image, after the cut
  };
  for (const Case& each :
       {Case{3, "half", 4 * 4 * 32}, Case{10, "half", 4 * 4 * 32},
        Case{3, "4,2", 2 * 2 * 64}}) {
    SCOPED_TRACE(each.partition);
    Options options = tiny_options();
    const Settings settings = {.variant = "pipeline",
                               .split_size = each.split,
                               .partition = each.partition};
    const Outcome outcome = run(options, settings);
    const double boundary = each.numel * 4;
    EXPECT_EQ(bytes_sent(outcome.records[0]), 3 * (10 * boundary + 10 * 8));
    EXPECT_EQ(bytes_sent(outcome.records[1]), 3 * 10 * boundary);

    const TwoDevices two(/*on_shapes=*/true);
    ModelParallelStrategy strategy(options, settings, two.all, 1);
    EXPECT_EQ(step_traffic(options, settings, strategy),
              (std::vector<double>{10 * boundary + 10 * 8, 10 * boundary}));
  }
}

// Splits do not change the memory held; a head alone keeps less of its input.
TEST(ModelParallelBill, MemoryHeldIsAsPredicted) {
  Options mlp = tiny_options();
  mlp.model = "mlp";
  mlp.seq = 8;
  mlp.optimizer = "adamw";
  using Case = std::pair<Options, std::string>;
  for (const auto& [options, partition] :
       {Case{mlp, "half"}, Case{tiny_options(), "half"},
        Case{tiny_options(), "5,1"}}) {
    for (const std::int64_t split : {1, 3, 10}) {
      const Settings settings = {
          .variant = "pipeline",
          .split_size = split,
          .partition = partition,
          .loss = options.model == "mlp" ? "cross_entropy" : "mse"};
      const TwoDevices two(/*on_shapes=*/true);
      ModelParallelStrategy strategy(options, settings, two.all, 1);
      strategy.step(strategy.batch(0));
      const std::vector<Bill> bills = strategy.bills();
      for (std::size_t i = 0; i < 2; ++i) {
        for (std::size_t k = 0; k < kNumHeldKinds; ++k) {
          const auto kind = static_cast<MemoryKind>(k);
          EXPECT_EQ(static_cast<double>(two.all[i].memory().held(kind)),
                    bills[i].memory.bytes[k])
              << options.model << ", " << partition << ", in splits of "
              << split << " on " << i << ", " << held_name(kind);
        }
      }
    }
  }
}

// The mlp's second half: fc2 keeps 5 h numbers per token, fc3 h, the logits and
// their softmax's sum 4 h + 1; the loss adds its gradient and the logits'.
TEST(ModelParallelBill, ThePeakIsAtTheLoss) {
  Options options = tiny_options();
  options.model = "mlp";
  options.seq = 8;
  const Settings naive = {.variant = "model_parallel", .loss = "cross_entropy"};
  const TwoDevices two(/*on_shapes=*/true);
  ModelParallelStrategy strategy(options, naive, two.all, 1);
  strategy.step(strategy.batch(0));
  const double tokens = 10 * 8, h = 64;
  EXPECT_EQ(
      static_cast<double>(two.all[1].memory().peak(MemoryKind::kActivation)),
      4 * (tokens * (6 * h + 2 * 4 * h + 1) + 2));
}

}  // namespace
}  // namespace shardbook::model_parallel
