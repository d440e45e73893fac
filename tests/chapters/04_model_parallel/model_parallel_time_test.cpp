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
double forward_s(std::int64_t rows, Make make) {
  const sim::CostModel costs(free_copies());
  const TwoDevices two(/*on_shapes=*/true);
  sim::ClockScope clock(costs, 0, true);
  clock.clock().add_device(two.all[1], 1);
  const auto model = make(two.all);
  const Tensor x = Tensor::zeros({rows, 8});
  clock.clock().begin_steps();
  (*model)(x);
  return clock.clock().now_s();
}

double pipelined_s(std::int64_t rows, std::int64_t split) {
  return forward_s(rows, [&](const std::vector<Device>& devices) {
    return std::make_unique<PipelineParallel>(EqualHalves(), 1, devices,
                                              InitOptions{}, split);
  });
}

TEST(ModelParallelTime, EqualHalvesTakeTheIdealShareOfTheNaiveSchedule) {
  const double naive = pipelined_s(840, 840);
  for (const std::int64_t n : {1, 2, 3, 4, 6, 8, 12}) {
    EXPECT_NEAR(pipelined_s(840, 840 / n), ideal_forward_share(n) * naive,
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
    sim::ClockScope clock(costs, 0, true);
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

class ModelParallelStepTime : public ::testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(DTypes, ModelParallelStepTime,
                         ::testing::Values(DType::kF32, DType::kBF16,
                                           DType::kF16),
                         [](const auto& info) {
                           return std::string(dtype_name(info.param));
                         });

TEST_P(ModelParallelStepTime, OfTwoDevicesRepeatsExactly) {
  const Options options = tiny_options(GetParam());
  const auto step_s = [&](bool on_shapes) {
    const sim::CostModel costs(sim::Cluster::read("kaggle-t4x2"));
    const TwoDevices two(on_shapes);
    sim::ClockScope clock(costs, 0, true);
    clock.clock().add_device(two.all[1], 1);
    ModelParallelStrategy strategy(
        options, {.variant = "pipeline", .split_size = 2}, two.all, 1);
    train(options, strategy.optimizer(), false, [&](std::int64_t step) {
      return strategy.step(strategy.batch(step));
    });
    std::vector<double> result;
    for (int i = 0; i < 2; ++i) {
      const auto& device = clock.clock().devices()[static_cast<std::size_t>(i)];
      result.push_back(device->summary().step_s);
      result.push_back(device->summary().idle_share);
      result.push_back(static_cast<double>(
          two.all[static_cast<std::size_t>(i)].memory().peak(
              MemoryKind::kActivation)));
    }
    return result;
  };
  const std::vector<double> on_shapes = step_s(true);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(step_s(true), on_shapes);
    EXPECT_EQ(step_s(false), on_shapes);
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
  const double naive = pipelined_s(840, 840);
  const double waiting =
      forward_s(840, [&](const std::vector<Device>& devices) {
        return std::make_unique<Waiting>(devices, 140);
      });
  EXPECT_NEAR(waiting, naive, 1e-3 * naive);
  EXPECT_NEAR(pipelined_s(840, 140), naive * 7 / 12, 1e-3 * naive);
}

}  // namespace
}  // namespace shardbook::model_parallel
