// Virtual time against closed forms: one device, its copies, and model
// parallelism.

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

#include "chapters/00_single_device/single_device.h"
#include "chapters/01_data_parallel/data_parallel.h"
#include "chapters/01_data_parallel/trainer.h"
#include "chapters/02_ddp/trainer.h"
#include "chapters/04_model_parallel/trainer.h"
#include "sim/virtual_clock.h"
#include "tests/chapters/common/textbook_support.h"

namespace shardbook::textbook {
namespace {

class Textbook : public ::testing::TestWithParam<int> {};

// --- One device --------------------------------------------------------------

// 6 flops for each weight and token, however the batch is cut.
TEST_P(Textbook, OneDeviceTakesSixFlopsPerWeightAndToken) {
  const Options options = mlp_options(1, 800);
  single_device::SingleDeviceOptions how;
  how.num_micro_batches = GetParam();
  const Report report = run_chapter(
      options, [&](const Options& as, ProcessGroup& world, Report& report) {
        single_device::SingleDevice device(as, how);
        const TrainingLog log =
            train(as, device.optimizer(), false,
                  [&](std::int64_t step) { return device.step(step); });
        finish_rank(as, world, log, 0, device.bill(), report);
      });
  expect_time(report.time.step_s, 6 * kLayers * kWeights * 800 * 64 / kRate);
}

// --- DDP ---------------------------------------------------------------------

/// Buckets leave one after the other, each when its last gradient is there.
double ddp_s(int n, double layer_s, const std::vector<double>& ready,
             const std::vector<double>& bytes) {
  const double forward = kLayers * layer_s;
  // The loss leaves first
  double sent = forward + all_reduce(n, 8);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    sent = std::max(sent, forward + ready[i]) + all_reduce(n, bytes[i]);
  }
  return std::max(sent, 3 * forward);
}

// F + B + c: one bucket, which leaves when all gradients are there.
TEST_P(Textbook, DdpWithOneBucketHidesNothing) {
  const int n = GetParam();
  const Options options = mlp_options(n, 80000);
  ddp::TrainerOptions how;
  how.ddp.first_bucket_mb = how.ddp.bucket_cap_mb = 1000;
  const double f = layer_forward_s(80000.0 * 64 / n);
  const double counted = step_s<ddp::Trainer>(options, how);
  expect_time(counted, 3 * kLayers * f + all_reduce(n, 4 * kParameters));
  expect_time(counted, ddp_s(n, f, {2 * kLayers * f}, {4 * kParameters}));
}

// A bucket per layer. Where it takes no longer than the backward of a layer,
// those of the first layer and of the embedding are left to wait for; where it
// takes longer, all of them but for the backward of the last layer.
TEST_P(Textbook, DdpHidesWhatBackwardLeavesTimeFor) {
  const int n = GetParam();
  for (const std::int64_t batch : {800, 8000, 80000}) {
    const Options options = mlp_options(n, batch);
    ddp::TrainerOptions how;
    how.ddp.first_bucket_mb = how.ddp.bucket_cap_mb = 4 * kWeights / (1 << 20);
    const double f = layer_forward_s(static_cast<double>(batch) * 64 / n);
    const std::vector<double> ready = {2 * f, 4 * f, 6 * f, 6 * f};
    // A layer's weights fill the bucket; its bias leaves with what comes next
    const std::vector<double> bytes = {4 * kWeights, 4 * (kWeights + 256),
                                       4 * (kWeights + 64),
                                       4 * (kWeights + 256)};
    SCOPED_TRACE(batch);
    expect_time(step_s<ddp::Trainer>(options, how), ddp_s(n, f, ready, bytes));
  }
}

// --- Devices of one process --------------------------------------------------

/// The second of two steps, of `make` on `n` devices.
using Train = std::function<void()>;
double devices_step_s(
    const Options& options, int n,
    const std::function<Train(const std::vector<Device>& devices)>& make) {
  const auto cost = cost_model(options);
  std::vector<Device> devices;
  for (int i = 0; i < n; ++i) devices.push_back(Device::meta(i, 0));
  RankContext context(devices[0], /*rank=*/0, 1);
  const RankContext::Scope scope(context);
  sim::ClockScope clock(*cost, 0, n);
  for (int i = 1; i < n; ++i) clock.clock().add_device(devices[i], i);
  const Train train = make(devices);
  clock.clock().begin_steps();
  for (int step = 0; step < 2; ++step) {
    train();
    clock.clock().end_step();
  }
  return clock.clock().last_step_s();
}

TEST_P(Textbook, DataParallelSendsEverythingThroughOneDevice) {
  const int n = GetParam();
  const Options options = mlp_options(n, 80000);
  const double f = layer_forward_s(80000.0 * 64 / n);
  const double counted = devices_step_s(
      options, n, [&](const std::vector<Device>& devices) -> Train {
        struct State {
          LoadedModel loaded;
          Dataset data;
          std::unique_ptr<Optimizer> optimizer;
          std::unique_ptr<data_parallel::DataParallel> model;
        };
        LoadedModel here = build_model(options);
        Dataset data = Dataset::open(options, here.config);
        auto optimizer = make_optimizer("sgd", here.model->parameters(), {});
        auto model =
            std::make_unique<data_parallel::DataParallel>(*here.model, devices);
        const auto state = std::make_shared<State>(
            State{std::move(here), std::move(data), std::move(optimizer),
                  std::move(model)});
        return [state, &options] {
          data_parallel::train_step(options, *state->model, *state->optimizer,
                                    state->data, 0);
        };
      });
  const double tokens = 80000.0 * 64 / n;
  expect_time(counted,
              3 * kLayers * f +
                  (n - 1) * (message(8 * tokens) +             // inputs
                             2 * message(4 * kParameters) +    // and gradients
                             2 * message(4 * 256 * tokens)));  // logits' too
}

// Naive: F + B, and a copy each way. With splits, the second half works on one
// while the first computes the next; copies hold both devices, there and back.
TEST(TextbookOfTwo, ModelParallelismComputesOneHalfAfterTheOther) {
  const Options options = mlp_options(2, 80000);
  // One layer on the first device, two on the second
  const double f = layer_forward_s(80000.0 * 64);
  for (const int splits : {1, 4, 8}) {
    model_parallel::Settings settings;
    settings.variant = splits == 1 ? "naive" : "pipeline";
    settings.split_size = 80000 / splits;
    settings.loss = "cross_entropy";
    const double counted = devices_step_s(
        options, 2, [&](const std::vector<Device>& devices) -> Train {
          const auto trainer = std::make_shared<model_parallel::Trainer>(
              options, settings, devices, 1);
          return [trainer] { trainer->step(trainer->batch(0)); };
        });
    const double tokens = 80000.0 * 64;
    const double copies = message(8 * tokens) +  // labels
                          2 * splits * message(4 * 256 * tokens / splits);
    // The second device is busy or copies; the first works alone at the ends
    expect_time(counted, 2 * 3 * f + 3 * f / splits + copies);
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, Textbook, ::testing::Values(1, 2, 4, 8));

}  // namespace
}  // namespace shardbook::textbook
