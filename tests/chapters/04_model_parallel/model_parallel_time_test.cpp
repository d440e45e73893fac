// Two devices overlap, or wait for each other, in virtual time.

#include "chapters/04_model_parallel/model_parallel.h"

#include <gtest/gtest.h>

#include "core/ops.h"
#include "sim/virtual_clock.h"
#include "tests/chapters/04_model_parallel/model_parallel_support.h"

namespace shardbook::model_parallel {
namespace {

using namespace test;

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

/// Two devices where a product takes 1 ms per million operations and everything
/// else no time.
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

// (1 + 1/n)(F + R) and n copies each way, on the cluster of the page.
TEST(ModelParallelTime, AStepOfEqualHalvesIsThePagesFormula) {
  const std::int64_t rows = 840;
  const sim::CostModel costs(sim::Cluster::read("textbook"));
  for (const std::int64_t n : {1, 2, 4, 8}) {
    const TwoDevices two(/*on_shapes=*/true);
    sim::ClockScope clock(costs, 0, 2);
    clock.clock().add_device(two.all[1], 1);
    PipelineParallel model(EqualHalves(), 1, two.all, InitOptions{}, rows / n);
    // With a gradient of the input, both halves have equal backwards
    Tensor x = Tensor::zeros({rows, 8});
    x.set_requires_grad();
    const Tensor y = Tensor::zeros({rows, 8}, {DType::kF32, two.all[1]});
    clock.clock().begin_steps();
    mse_loss(model(x), y).backward();
    clock.clock().end_step();
    const double parts = static_cast<double>(n);
    const double f = 2.0 * 8 * 8 * rows / 1e14, r = 2 * f;
    const double copy = 5e-6 + 4.0 * 8 * rows / parts / 1e11;
    const double formula = (1 + 1 / parts) * (f + r) + 2 * parts * copy;
    EXPECT_NEAR(clock.clock().last_step_s(), formula, 1e-9 * formula)
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
    ModelParallelStrategy strategy(
        options, {.variant = "pipeline", .split_size = 2}, devices, 1);
    train(options, strategy.optimizer(), false, [&](std::int64_t step) {
      return strategy.step(strategy.batch(step));
    });
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

}  // namespace
}  // namespace shardbook::model_parallel
