// Two halves on two devices: the numbers of one device, the bytes at the
// boundary, what overlaps, and what goes wrong.

#include "chapters/04_model_parallel/model_parallel.h"

#include <gtest/gtest.h>

#include <cmath>
#include <optional>

#include "chapters/04_model_parallel/bill.h"
#include "chapters/04_model_parallel/toy.h"
#include "chapters/04_model_parallel/trainer.h"
#include "chapters/common/models/resnet.h"
#include "core/autograd.h"
#include "core/check.h"
#include "core/ops.h"
#include "sim/virtual_clock.h"
#include "tests/chapters/04_model_parallel/model_parallel_support.h"

namespace shardbook::model_parallel {
namespace {

using namespace test;

/// What a training run left behind.
struct Outcome {
  std::vector<double> losses;
  Tensor output;                    // of one more forward
  std::vector<NamedTensor> values;  // parameters and running statistics
  std::vector<std::vector<CommRecord>> records;
};

Outcome run(const Options& options, const Settings& settings) {
  std::vector<Device> devices;
  for (int i = 0; i < settings.num_devices(); ++i) {
    devices.push_back(Device::cpu(i));
  }
  RankContext context(devices[0], 0, 1);
  context.deterministic = true;
  RankContext::Scope scope(context);
  Trainer trainer(options, settings, devices, 1);
  Outcome outcome;
  outcome.losses =
      train(options, trainer.optimizer(), false, [&](std::int64_t step) {
        return trainer.step(trainer.batch(step));
      }).losses;
  if (trainer.copies() != nullptr) {
    for (const Device& device : devices) {
      outcome.records.push_back(trainer.copies()->records(device));
    }
  }
  for (int i = 0; i < settings.num_devices(); ++i) {
    for (const auto& each : trainer.part(i).named_parameters()) {
      outcome.values.push_back(each);
    }
    for (const auto& each : trainer.part(i).named_buffers()) {
      outcome.values.push_back(each);
    }
  }
  NoGrad no_grad;
  outcome.output = trainer.forward(trainer.batch(0).inputs);
  return outcome;
}

const NamedTensor& find(const Outcome& outcome, const std::string& name) {
  for (const NamedTensor& each : outcome.values) {
    if (each.name == name) return each;
  }
  SB_FAIL("no value '", name, "'");
}

void expect_same_bits(const Outcome& a, const Outcome& b) {
  EXPECT_EQ(a.losses, b.losses);
  EXPECT_TRUE(bitwise_equal(a.output, b.output));
  ASSERT_EQ(a.values.size(), b.values.size());
  for (const NamedTensor& each : a.values) {
    EXPECT_TRUE(bitwise_equal(each.tensor, find(b, each.name).tensor))
        << each.name;
  }
}

double relative_difference(const Tensor& a, const Tensor& b) {
  const auto x = a.to_vector<double>(), y = b.to_vector<double>();
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    difference += (x[i] - y[i]) * (x[i] - y[i]);
    norm += y[i] * y[i];
  }
  return norm == 0 ? std::sqrt(difference) : std::sqrt(difference / norm);
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

TEST(ModelParallelCut, LeavesEachDeviceItsLayers) {
  const auto layers = toy_layers();
  const Device a = Device::cpu(0), b = Device::cpu(1);
  for (const int cut : {-1, 0, 2, 3}) {
    EXPECT_THROW(ModelParallel(*layers, cut, {a, b}, {}), Error) << cut;
  }
  EXPECT_THROW(ModelParallel(*layers, 1, {a}, {}), Error);
  EXPECT_THROW(ModelParallel(*layers, 1, {a, a}, {}), Error);
  EXPECT_THROW(PipelineParallel(*layers, 1, {a, b}, {}, 0), Error);
  // GPT's token embedding is its last layer, too.
  const auto gpt = layers_of(ModelConfig::read("gpt-nano"));
  EXPECT_NE(error_of([&] {
              ModelParallel(*gpt, 3, {a, b}, {});
            }).find("both sides of the cut"),
            std::string::npos);
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
  // 10 rows: 2 2 2 2 2, 3 3 3 1, 4 4 2, all at once
  for (const std::int64_t split : {2, 3, 4, 50}) {
    SCOPED_TRACE(split);
    const Settings settings = {.variant = "pipeline", .split_size = split};
    expect_same_bits(run(options, settings),
                     run(options, on_one_device(settings)));
  }
}

TEST_P(ModelParallelParity, OneSplitIsTheNaiveSchedule) {
  const Options options = tiny_options(GetParam());
  expect_same_bits(run(options, {.variant = "pipeline", .split_size = 10}),
                   run(options, {.variant = "model_parallel"}));
}

INSTANTIATE_TEST_SUITE_P(DTypes, ModelParallelParity,
                         ::testing::Values(DType::kF32, DType::kF64),
                         [](const auto& info) {
                           return std::string(dtype_name(info.param));
                         });

TEST(ModelParallelBatchNorm, SeesOneSplitAtATime) {
  Options options = tiny_options(DType::kF64);
  options.steps = 1;
  options.optimizer_options.lr = 0;
  const Outcome whole = run(options, {.variant = "model_parallel"});
  const Outcome splits = run(options, {.variant = "pipeline", .split_size = 5});
  EXPECT_GT(relative_difference(splits.output, whole.output), 1e-3);
}

TEST(ModelParallelBatchNorm, RunningStatisticsAreUpdatedOncePerSplit) {
  // Two splits with the same images: each update moves a running mean by a
  // tenth of the way, so that after n of them 0.9^n is left to go.
  const auto layers = resnet_layers(ModelConfig::read(kTiny));
  const std::vector<Device> devices = {Device::cpu(0), Device::cpu(1)};
  RankContext context(devices[0], 0, 1);
  RankContext::Scope scope(context);
  InitOptions init;
  init.dtype = DType::kF64;
  const Tensor half = Tensor::empty({3, 3, 32, 32}, {DType::kF64, devices[0]});
  fill_normal(half, 1, 2, 0.5, 1);
  for (const int num_splits : {1, 2, 6}) {
    Tensors same(static_cast<std::size_t>(num_splits), half);
    PipelineParallel model(*layers, 3, devices, init, 3);
    model(concat(same, 0));
    const Tensor mean = model.half(0).named_buffers()[0].tensor;
    PipelineParallel once(*layers, 3, devices, init, 3);
    once(half);
    const Tensor first = once.half(0).named_buffers()[0].tensor;
    const double expected =
        (1 - std::pow(0.9, num_splits)) / 0.1 * first.to_vector<double>()[0];
    EXPECT_NEAR(mean.to_vector<double>()[0], expected, 1e-12) << num_splits;
  }
}

TEST(ModelParallelToy, PipelinedOutputsAreBitsAndGradientsSums) {
  const std::vector<Device> devices = {Device::cpu(0), Device::cpu(1)};
  RankContext context(devices[0], 0, 1);
  context.deterministic = true;
  RankContext::Scope scope(context);
  InitOptions init;
  init.seed = 3;
  const auto layers = toy_layers();
  const Tensor x = Tensor::empty({20, 10}), y = Tensor::empty({20, 5});
  fill_normal(x, 1, 1, 0, 1);
  fill_normal(y, 1, 2, 0, 1);

  Stage one(*layers, 0, 2, init);
  const Tensor expected = one(x);
  mse_loss(expected, y).backward();
  for (const std::int64_t split : {1, 3, 7, 20}) {
    SCOPED_TRACE(split);
    PipelineParallel model(*layers, 1, devices, init, split);
    const Tensor output = model(x);
    EXPECT_EQ(output.device(), devices[1]);
    EXPECT_TRUE(bitwise_equal(output, expected));
    mse_loss(output, to_device(y, output.device())).backward();
    const auto mine = model.named_parameters();
    const auto theirs = one.named_parameters();
    ASSERT_EQ(mine.size(), 4u);
    for (std::size_t i = 0; i < mine.size(); ++i) {
      EXPECT_EQ(mine[i].name, theirs[i].name);
      // Each gradient is where its parameter is; summed split by split.
      EXPECT_EQ(mine[i].tensor.grad().device(), devices[i / 2]);
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

TEST(ModelParallelToy, TrainsToTheSameNumbersOnTwoDevices) {
  Options options;
  options.steps = 5;
  options.optimizer = "sgd";
  options.optimizer_options.lr = 0.1;
  const std::vector<ToyRun> runs = train_toy(options, /*split_size=*/6);
  ASSERT_EQ(runs.size(), 3u);
  for (const ToyRun& run : runs) {
    ASSERT_EQ(run.losses.size(), 5u);
    EXPECT_LT(run.losses.back(), run.losses.front()) << run.name;
    ASSERT_EQ(run.values.size(), 5u);
  }
  EXPECT_EQ(runs[1].largest_difference, 0);
  EXPECT_EQ(runs[1].losses, runs[0].losses);
  // Gradients of four splits are added up in another order
  EXPECT_GT(runs[2].largest_difference, 0);
  EXPECT_LT(runs[2].largest_difference, 1e-6);
  const std::string text = toy_text(runs);
  EXPECT_NE(text.find("net1.weight   [10, 10]    cpu:0"), std::string::npos)
      << text;
  EXPECT_NE(text.find("output        [20, 5]     cpu:1"), std::string::npos)
      << text;
}

TEST(ModelParallelTrainer, ClippingUsesTheNormOfBothHalves) {
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

// --- Bytes -------------------------------------------------------------------

/// (label, numel) of what one device sends in one step of ResNet-50, batch 120
/// of 3x128x128, on shapes.
using Sent = std::vector<std::pair<std::string, std::int64_t>>;
Sent sent_by(int device, const Settings& settings) {
  Options options = tiny_options();
  options.model = "resnet50";
  options.batch = 120;
  options.image_size = 128;
  const std::vector<Device> devices = {Device::meta(0), Device::meta(1)};
  RankContext context(devices[0]);
  RankContext::Scope scope(context);
  Trainer trainer(options, settings, devices, 1);
  trainer.step(trainer.batch(0));
  Sent sent;
  for (const CommRecord& record :
       trainer.copies()->records(devices[static_cast<std::size_t>(device)])) {
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
  // 50, 50 and 20 images
  EXPECT_EQ(sent_by(1, {.variant = "pipeline", .split_size = 50}),
            (Sent{{"gradients", 20 * 131072},
                  {"gradients", 50 * 131072},
                  {"gradients", 50 * 131072}}));
}

TEST(ModelParallelBill, TrafficIsTheBoundaryOfTheBatch) {
  for (const std::int64_t split : {3, 10}) {
    Options options = tiny_options();
    const Outcome outcome =
        run(options, {.variant = "pipeline", .split_size = split});
    const auto layers = resnet_layers(ModelConfig::read(kTiny));
    const double boundary = boundary_numel(options, *layers, 3) * 4;
    EXPECT_EQ(boundary, 4 * 4 * 32 * 4);  // 4x4 pixels of 8 * 4 channels
    EXPECT_EQ(bytes_sent(outcome.records[0]), 3 * (10 * boundary + 10 * 8));
    EXPECT_EQ(bytes_sent(outcome.records[1]), 3 * 10 * boundary);
  }
}

TEST(ModelParallelBill, ActivationsOfTheWholeBatchStayUntilBackward) {
  const auto layers = layers_of(ModelConfig::read("mlp"));
  const Tensor tokens = Tensor::zeros({8, 4}, {DType::kI64, Device::cpu(7)});
  std::vector<std::int64_t> kept;
  for (const std::int64_t split : {1, 2, 8}) {
    const std::vector<Device> devices = {Device::cpu(0), Device::cpu(1)};
    RankContext context(devices[0], 0, 1);
    RankContext::Scope scope(context);
    PipelineParallel model(*layers, 2, devices, {}, split);
    const Tensor output = model(to_device(tokens, devices[0]));
    kept.push_back(devices[0].memory().current(MemoryKind::kActivation));
  }
  EXPECT_EQ(kept[0], kept[2]);
  EXPECT_EQ(kept[1], kept[2]);
}

// Splits: the next gradients of a layer exist beside the sums. What a linear
// layer gets at a time is the gradient of its weight and of its bias.
TEST(ModelParallelBill, GradientsOfSplitsAreThosePredicted) {
  Options mlp = tiny_options();
  mlp.model = "mlp";
  mlp.seq = 8;
  // Labels beyond measure, so that the head is the largest layer
  Options head = tiny_options();
  head.model = R"({"model_type": "resnet", "depths": [1, 1],
      "embedding_size": 4, "num_labels": 500})";
  for (const Options& options : {mlp, head, tiny_options()}) {
    for (const std::int64_t split : {1, 3, 10}) {
      const Settings settings = {
          .variant = "pipeline",
          .split_size = split,
          .loss = options.model == "mlp" ? "cross_entropy" : "mse"};
      const std::vector<Device> devices = {Device::meta(0), Device::meta(1)};
      RankContext context(devices[0], 0, 1);
      RankContext::Scope scope(context);
      Trainer trainer(options, settings, devices, 1);
      trainer.step(trainer.batch(0));
      auto bills = memory_bills(options, settings, trainer);
      for (std::size_t i = 0; i < 2; ++i) {
        EXPECT_EQ(static_cast<double>(
                      devices[i].memory().peak(MemoryKind::kGradient)),
                  bills[i][MemoryKind::kGradient])
            << options.model << " in splits of " << split << " on " << i;
      }
    }
  }
}

// --- Time --------------------------------------------------------------------

/// A layer without bias: [n, 8] -> [n, 8].
class Square : public ModuleOf<Square> {
 public:
  Square(std::string name, const InitOptions& init)
      : name_(std::move(name)), linear_(name_, 8, 8, init, false) {}
  Tensor forward(const Tensor& x) override { return linear_(x); }
  void members(MemberVisitor& visit) override { visit.module(name_, linear_); }

 private:
  std::string name_;
  Linear linear_;
};
class EqualHalves : public LayerList {
 public:
  int size() const override { return 2; }
  std::string name(int layer) const override { return std::to_string(layer); }
  std::unique_ptr<Module> make(int layer,
                               const InitOptions& init) const override {
    return std::make_unique<Square>(name(layer), init);
  }
};

/// Two devices on which a product takes 1 ms per million operations, and
/// nothing else takes anything.
sim::Cluster free_copies() {
  return sim::Cluster::from_json(R"({
    "name": "ideal", "nodes": 1, "devices_per_node": 2,
    "device": {"name": "d", "peak_TFLOPS": {"f32": 1},
               "bandwidth_GB_per_s": 1e6, "capacity_GB": 1, "launch_us": 0,
               "kernel_us": 0,
               "operations": {"linear forward": {"us": 0, "us_per_MFLOP": 1000}}},
    "intra_node": {"kind": "switch", "bandwidth_GB_per_s": 1e6,
                   "latency_us": 0, "efficiency": 1},
    "host_link": {"bandwidth_GB_per_s": 1e6, "latency_us": 0},
    "host": {"name": "h", "peak_TFLOPS": {"f32": 1},
             "bandwidth_GB_per_s": 1, "capacity_GB": 1}})",
                                 "ideal");
}

/// Virtual seconds of one forward of `rows` rows; `make` returns the model.
template <typename Make>
double forward_s(bool on_meta, std::int64_t rows, Make make) {
  const sim::CostModel costs(free_copies());
  const std::vector<Device> devices =
      on_meta ? std::vector<Device>{Device::meta(0), Device::meta(1)}
              : std::vector<Device>{Device::cpu(0), Device::cpu(1)};
  RankContext context(devices[0], 0, 1);
  RankContext::Scope scope(context);
  sim::ClockScope clock(costs, 0, 2);
  clock.clock().add_device(devices[1], 1);
  const auto model = make(devices);
  const Tensor x = Tensor::zeros({rows, 8});
  clock.clock().begin_steps();
  (*model)(x);
  return clock.clock().now_s();
}

double pipelined_s(bool on_meta, std::int64_t rows, std::int64_t split) {
  return forward_s(on_meta, rows, [&](const std::vector<Device>& devices) {
    return std::make_unique<PipelineParallel>(EqualHalves(), 1, devices,
                                              InitOptions{}, split);
  });
}

TEST(ModelParallelTime, EqualHalvesTakeTheIdealShareOfTheNaiveSchedule) {
  const double naive = pipelined_s(true, 840, 840);
  for (const std::int64_t n : {1, 2, 3, 4, 6, 8, 12}) {
    EXPECT_NEAR(pipelined_s(true, 840, 840 / n), ideal_forward_share(n) * naive,
                1e-3 * naive)
        << n << " splits";
  }
}

TEST(ModelParallelTime, IsTheSameOnThreadsEveryTime) {
  const double on_shapes = pipelined_s(true, 24, 4);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(pipelined_s(false, 24, 4), on_shapes);
}

class ModelParallelStepTime : public ::testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(DTypes, ModelParallelStepTime,
                         ::testing::Values(DType::kF32, DType::kBF16,
                                           DType::kF16),
                         [](const auto& info) {
                           return std::string(dtype_name(info.param));
                         });

TEST_P(ModelParallelStepTime, OfTwoDevicesRepeatsExactly) {
  const Options options = tiny_options(GetParam());
  const auto step_s = [&](DeviceType type) {
    const sim::CostModel costs(sim::Cluster::read("kaggle-t4x2"));
    std::vector<Device> devices;
    for (int i = 0; i < 2; ++i) {
      devices.push_back(type == DeviceType::kMeta ? Device::meta(i)
                                                  : Device::cpu(i));
    }
    RankContext context(devices[0], 0, 1);
    context.deterministic = true;
    RankContext::Scope scope(context);
    sim::ClockScope clock(costs, 0, 2);
    clock.clock().add_device(devices[1], 1);
    Trainer trainer(options, {.variant = "pipeline", .split_size = 2}, devices,
                    1);
    train(options, trainer.optimizer(), false,
          [&](std::int64_t step) { return trainer.step(trainer.batch(step)); });
    std::vector<double> result;
    for (int i = 0; i < 2; ++i) {
      const auto& device = clock.clock().devices()[static_cast<std::size_t>(i)];
      result.push_back(device->summary().step_s);
      result.push_back(device->summary().idle_share);
      result.push_back(static_cast<double>(
          devices[static_cast<std::size_t>(i)].memory().peak(
              MemoryKind::kActivation)));
    }
    return result;
  };
  const std::vector<double> on_shapes = step_s(DeviceType::kMeta);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(step_s(DeviceType::kMeta), on_shapes);
    EXPECT_EQ(step_s(DeviceType::kCpu), on_shapes);
  }
}

// --- Traps -------------------------------------------------------------------

/// The host looks at every output before it hands out the next split.
class Waiting : public ModelParallel {
 public:
  Waiting(const std::vector<Device>& devices, std::int64_t split_size)
      : ModelParallel(EqualHalves(), 1, devices, {}), split_size_(split_size) {}
  Tensor operator()(const Tensor& x) override {
    Tensors outputs;
    for (const auto& [begin, end] : fixed_splits(x.size(0), split_size_)) {
      outputs.push_back(
          join({run(1, move(run(0, now(slice(x, 0, begin, end)))))}));
    }
    return outputs.back();
  }

 private:
  std::int64_t split_size_;
};

TEST(ModelParallelTrap, AHostThatWaitsForEachSplitOverlapsNothing) {
  const double naive = pipelined_s(true, 840, 840);
  const double waiting =
      forward_s(true, 840, [&](const std::vector<Device>& devices) {
        return std::make_unique<Waiting>(devices, 140);
      });
  EXPECT_NEAR(waiting, naive, 1e-3 * naive);
  EXPECT_NEAR(pipelined_s(true, 840, 140), naive * 7 / 12, 1e-3 * naive);
}

TEST(ModelParallelTrap, LabelsOnTheFirstDeviceAreAnError) {
  const std::vector<Device> devices = {Device::cpu(0), Device::cpu(1)};
  RankContext context(devices[0], 0, 1);
  RankContext::Scope scope(context);
  ModelParallel model(*toy_layers(), 1, devices, {});
  const Tensor x = Tensor::zeros({4, 10}), y = Tensor::zeros({4, 5});
  const Tensor output = model(x);
  const std::string error = error_of([&] { mse_loss(output, y); });
  EXPECT_NE(error.find("devices cpu:1 and cpu:0 differ"), std::string::npos)
      << error;
}

/// The tutorial's container: the layers stand under their own names, and once more
/// inside of seq1.
class TwoNames : public ModuleOf<TwoNames> {
 public:
  TwoNames() : conv1("conv1", 3, 2, InitOptions{}), seq1(conv1) {}
  Tensor forward(const Tensor& x) override { return seq1(x); }
  void members(MemberVisitor& visit) override {
    visit.module("conv1", conv1);
    visit.module("seq1.0", seq1);
  }
  Linear conv1, seq1;
};

TEST(ModelParallelTrap, AParameterUnderTwoNamesStepsOnce) {
  TwoNames model;
  EXPECT_EQ(model.named_parameters().size(), 2u);
  const auto weight_after = [&](const Tensors& parameters) {
    const Tensor weight = model.conv1.weight;
    const Tensor before = weight.clone();
    weight.set_grad(Tensor::full(weight.shape(), 1, weight.options()));
    make_optimizer("sgd", parameters, {.lr = 0.5})->step();
    const double moved =
        before.to_vector<double>()[0] - weight.to_vector<double>()[0];
    weight.copy_from(before);
    return moved;
  };
  EXPECT_NEAR(weight_after(model.parameters()), 0.5, 1e-6);
  // Who lists each name steps twice.
  EXPECT_NEAR(weight_after({model.conv1.weight, model.seq1.weight}), 1, 1e-6);
}

TEST(ModelParallelTrap, WhatADeviceThrowsArrivesAndTheNextForwardWorks) {
  const std::vector<Device> devices = {Device::cpu(0), Device::cpu(1)};
  RankContext context(devices[0], 0, 1);
  RankContext::Scope scope(context);
  PipelineParallel model(*toy_layers(), 1, devices, {}, 2);
  const std::string error = error_of([&] { model(Tensor::zeros({6, 11})); });
  EXPECT_NE(error.find("11"), std::string::npos) << error;
  EXPECT_EQ(model(Tensor::zeros({6, 10})).shape(), (Shape{6, 5}));
}

}  // namespace
}  // namespace shardbook::model_parallel
