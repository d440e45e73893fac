// Virtual time against closed forms.
//
// On the cluster `textbook` a product takes its operations over one rate, a
// message latency plus bytes over bandwidth, and nothing else takes time. What
// a step takes there is written down here from sizes and degrees, as on the
// chapters' pages, and must be what the clock comes to.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>

#include "chapters/00_single_device/single_device.h"
#include "chapters/01_data_parallel/data_parallel.h"
#include "chapters/01_data_parallel/trainer.h"
#include "chapters/02_ddp/trainer.h"
#include "chapters/03_zero_fsdp/trainer.h"
#include "chapters/04_model_parallel/trainer.h"
#include "chapters/05_gpipe/gpipe.h"
#include "chapters/06_1f1b/schedules.h"
#include "chapters/common/pipeline/engine.h"
#include "chapters/common/pipeline/feed.h"
#include "chapters/common/run/worlds.h"
#include "core/ops.h"
#include "sim/world.h"

namespace shardbook {
namespace {

// --- The cluster -------------------------------------------------------------

constexpr double kRate = 1e14;       // flops per second
constexpr double kLatency = 5e-6;    // seconds
constexpr double kBandwidth = 1e11;  // bytes per second

double message(double bytes) { return kLatency + bytes / kBandwidth; }
double all_gather(int n, double bytes) {
  return (n - 1) * (kLatency + bytes / n / kBandwidth);
}
double reduce_scatter(int n, double bytes) { return all_gather(n, bytes); }
double all_reduce(int n, double bytes) {
  return reduce_scatter(n, bytes) + all_gather(n, bytes);
}

// --- The model ---------------------------------------------------------------

// The model "mlp": an embedding, which costs nothing here, and three layers of
// 64 x 256 or 256 x 64 weights, which cost the same.
constexpr int kLayers = 3;
constexpr double kWeights = 64 * 256;
constexpr double kParameters = 4 * kWeights + 256 + 64 + 256;

/// Forward of one layer; backward takes twice as long, half of it for the
/// gradient of the weights.
double layer_forward_s(double tokens) { return 2 * kWeights * tokens / kRate; }

Options mlp_options(int world_size, std::int64_t batch) {
  Options options;
  options.world_size = world_size;
  options.model = "mlp";
  options.data = "random";
  options.backend = "sim";
  options.cluster = "textbook";
  options.steps = 3;
  options.batch = batch;
  options.seq = 64;
  return options;
}

template <typename Trainer, typename How>
double step_s(const Options& options, const How& how) {
  const Report report = run_chapter(
      options, [&](const Options& as, ProcessGroup& world, Report& report) {
        Trainer trainer(as, how, world);
        const TrainingLog log =
            train(as, trainer.optimizer(), false,
                  [&](std::int64_t step) { return trainer.step(step); });
        finish_rank(as, world, log, trainer.predicted_bytes(), trainer.bill(),
                    report);
      });
  return report.time.step_s;
}

void expect_time(double counted, double closed_form) {
  EXPECT_NEAR(counted / closed_form, 1, 1e-9)
      << counted << " s counted, " << closed_form << " s by the closed form";
}

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

// --- ZeRO and FSDP -----------------------------------------------------------

// One unit: all parameters are gathered before forward and stay until backward
// has used them; gradients are scattered after it.
TEST_P(Textbook, FsdpOfOneUnitGathersAndScattersOnce) {
  const int n = GetParam();
  const Options options = mlp_options(n, 80000);
  zero_fsdp::TrainerOptions how;
  how.strategy = "fsdp";
  how.wrap = "none";
  const double f = layer_forward_s(80000.0 * 64 / n);
  const double padded = std::ceil(kParameters / n) * n;
  expect_time(step_s<zero_fsdp::Trainer>(options, how),
              all_gather(n, 4 * padded) + 3 * kLayers * f +
                  reduce_scatter(n, 4 * padded) + all_reduce(n, 8));
}

// The same messages in another order: gradients are scattered, then parameters
// gathered.
TEST_P(Textbook, ZeroStagesScatterThenGather) {
  const int n = GetParam();
  for (const char* strategy : {"zero1", "zero2"}) {
    const Options options = mlp_options(n, 80000);
    zero_fsdp::TrainerOptions how;
    how.strategy = strategy;
    const double f = layer_forward_s(80000.0 * 64 / n);
    const double padded = std::ceil(kParameters / n) * n;
    SCOPED_TRACE(strategy);
    expect_time(step_s<zero_fsdp::Trainer>(options, how),
                3 * kLayers * f + reduce_scatter(n, 4 * padded) +
                    all_gather(n, 4 * padded) + all_reduce(n, 8));
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

// --- Pipelines ---------------------------------------------------------------

constexpr std::int64_t kWidth = 4096;
constexpr int kSeq = 64;

/// A product with 4096 x 4096 weights; the first one looks up its input,
/// so that it has a gradient to send nobody.
class EqualLayer : public ModuleOf<EqualLayer> {
 public:
  EqualLayer(int index, const InitOptions& init)
      : name_("layer" + std::to_string(index)) {
    weight_ = make_parameter(name_ + ".weight", {kWidth, kWidth}, 0.1, init);
    if (index > 0) return;
    vectors_ = make_parameter(name_ + ".vectors", {kWidth, kWidth}, 1, init);
  }
  Tensor forward(const Tensor& x) {
    return linear(vectors_.defined() ? embedding(vectors_, x) : x, weight_);
  }
  void members(MemberVisitor& visit) override {
    visit.parameter(name_ + ".weight", weight_);
    if (vectors_.defined()) visit.parameter(name_ + ".vectors", vectors_);
  }

 private:
  std::string name_;
  Tensor weight_, vectors_;
};

class EqualLayers : public LayerList {
 public:
  explicit EqualLayers(int size) : size_(size) {}
  int size() const override { return size_; }
  std::string name(int layer) const override {
    return "layer" + std::to_string(layer);
  }
  std::unique_ptr<Module> make(int layer,
                               const InitOptions& init) const override {
    return std::make_unique<EqualLayer>(layer, init);
  }

 private:
  int size_;
};

/// p stages of two layers, m micro-batches of `rows` samples.
struct Shape {
  int p = 1, m = 1;
  std::int64_t rows = 1;

  double tokens() const { return static_cast<double>(rows * kSeq); }
  double forward_s() const {
    return 2 * 2 * kWidth * kWidth * tokens() / kRate;
  }
  double message_s() const { return message(tokens() * kWidth * 4); }
  /// The loss and the norm, at the end.
  double end_s() const { return all_reduce(p, 16); }
  std::vector<int> cuts() const {
    std::vector<int> cuts;
    for (int s = 0; s <= p; ++s) cuts.push_back(2 * s);
    return cuts;
  }
  Options options() const {
    Options options = mlp_options(p, m * rows);
    options.seq = kSeq;
    options.optimizer = "sgd";
    return options;
  }
};

/// The second of two steps; `make` builds what trains a batch on this rank and
/// returns the loss.
using TrainBatch = std::function<double()>;
double pipeline_step_s(
    const Shape& shape,
    const std::function<TrainBatch(PipelineModel& model, ProcessGroup& world)>&
        make) {
  const Options options = shape.options();
  const auto layers = std::make_shared<EqualLayers>(2 * shape.p);
  sim::WorldOptions world;
  world.launch = launch_options(options);
  world.cost = cost_model(options);
  double step_s = 0;
  sim::run_world(
      shape.p,
      [&](ProcessGroup& group) {
        PipelineModel model(options, layers, one_stage_per_rank(shape.cuts()),
                            group);
        const auto optimizer = make_optimizer(
            options.optimizer, model.parameters(), options.optimizer_options);
        const TrainBatch train = make(model, group);
        sim::VirtualClock& clock = *sim::VirtualClock::current();
        clock.begin_steps();
        for (int step = 0; step < 2; ++step) {
          const double loss = train();
          model.reduce_shared_gradients();
          model.update(options, *optimizer, loss);
          clock.end_step();
        }
        step_s = std::max(step_s, clock.last_step_s());
      },
      world);
  return step_s;
}

double schedule_step_s(const Shape& shape, const pipeline::Schedule& schedule,
                       const pipeline::EngineOptions& how = {}) {
  const Options options = shape.options();
  const Dataset data = Dataset::open("random", kSeq, kWidth, 0);
  const auto pieces = ceil_micro_batches(options.batch, shape.m);
  return pipeline_step_s(
      shape, [&](PipelineModel& model, ProcessGroup& world) -> TrainBatch {
        const auto feed =
            std::make_shared<pipeline::LanguageFeed>(options, data, pieces);
        const auto engine = std::make_shared<pipeline::Engine>(
            schedule, model, world, *feed, nullptr, how);
        return [feed, engine] { return engine->run(); };
      });
}

double gpipe_step_s(const Shape& shape, pipeline::Recompute recompute,
                    bool early) {
  pipeline::EngineOptions how;
  how.recompute = recompute;
  how.early_recompute = early;
  how.reads_losses_late = true;
  return schedule_step_s(shape, gpipe::schedule(shape.p, shape.m), how);
}

// Fill, then one micro-batch at a time: (m + p - 1)(f + b), and a message from
// stage to stage, there and back.
TEST_P(Textbook, GpipeIsFillPlusOneMicroBatchAtATime) {
  const int p = GetParam();
  for (const Shape& shape : {Shape{p, 1, 4}, Shape{p, 8, 4}}) {
    const double f = shape.forward_s(), c = shape.message_s();
    ASSERT_LE(c, f) << "messages must not be what the pipeline waits for";
    const int m = shape.m;
    SCOPED_TRACE(m);
    expect_time(gpipe_step_s(shape, pipeline::Recompute::kNever, false),
                (m + p - 1) * (f + 2 * f) + 2 * (p - 1) * c + shape.end_s());
    expect_time(gpipe_step_s(shape, pipeline::Recompute::kAlways, false),
                (m + p - 1) * (f + 3 * f) + 2 * (p - 1) * c + shape.end_s());
    // While the first gradient is on its way, stages make their graph again
    expect_time(gpipe_step_s(shape, pipeline::Recompute::kAlways, true),
                (m + p - 1) * f + m * 3 * f + (p - 1) * 2 * f +
                    2 * (p - 1) * c + shape.end_s());
    // The last micro-batch is kept
    expect_time(gpipe_step_s(shape, pipeline::Recompute::kExceptLast, true),
                (m + p - 1) * f + (m - 1) * 3 * f + p * 2 * f +
                    2 * (p - 1) * c + shape.end_s());
  }
}

// As GPipe, and each micro-batch after the first waits for a message on its way
// to the last stage or back, but for one in p.
TEST_P(Textbook, OneForwardOneBackwardWaitsForMessagesInItsSteadyState) {
  const int p = GetParam();
  for (const int m : {1, 2, 8, 11}) {
    const Shape shape{p, m, 4};
    const double f = shape.forward_s(), c = shape.message_s();
    ASSERT_LE(c, f) << "messages must not be what the pipeline waits for";
    const int waits = (p - 1) + (m - 1) - (m - 1 + p - 1) / p;
    SCOPED_TRACE(m);
    expect_time(schedule_step_s(shape, pipeline::schedules::one_f_one_b(p, m)),
                (m + p - 1) * (f + 2 * f) + 2 * waits * c + shape.end_s());
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, Textbook, ::testing::Values(1, 2, 4, 8));

}  // namespace
}  // namespace shardbook
