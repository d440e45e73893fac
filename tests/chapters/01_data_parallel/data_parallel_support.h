#pragma once

// Devices, a model that counts its calls, and comparisons of gradients.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "chapters/01_data_parallel/data_parallel.h"
#include "chapters/common/models/models.h"
#include "chapters/common/run/options.h"
#include "core/check.h"
#include "core/context.h"
#include "core/layers.h"
#include "core/ops.h"
#include "tests/support/errors.h"

namespace shardbook::data_parallel::test {

// Tolerances: a step adds the same products in another order.
constexpr double kF64 = 1e-10;
constexpr double kF32 = 1e-5;

inline std::vector<Device> make_devices(int n, std::int64_t capacity = 0) {
  std::vector<Device> devices;
  for (int i = 0; i < n; ++i) devices.push_back(Device::cpu(i, capacity));
  return devices;
}

/// A context on device 0 of `n` for the length of a test.
struct World {
  explicit World(int n)
      : devices(make_devices(n)), context(devices[0], 0, 1), scope(context) {}
  std::vector<Device> devices;
  RankContext context;
  RankContext::Scope scope;
};

inline Tensor random_tensor(const Shape& shape, std::uint64_t stream,
                            DType dtype = DType::kF64) {
  Tensor x = Tensor::empty(shape, {dtype, Device()});
  fill_normal(x, 7, stream, 0, 1);
  return x;
}

inline Tensor random_tokens(std::int64_t rows, std::int64_t seq,
                            std::int64_t vocab) {
  std::vector<std::int64_t> values;
  std::uint64_t state = 12345;
  for (std::int64_t i = 0; i < rows * seq; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    values.push_back(static_cast<std::int64_t>((state >> 33) % vocab));
  }
  return Tensor::from_values<std::int64_t>(values, {rows, seq});
}

/// Three linear layers that record facts about their replicas for tests.
class Probe : public ModuleOf<Probe> {
 public:
  explicit Probe(DType dtype = DType::kF64)
      : fc1("fc1", 6, 10, {1, dtype, Device()}),
        fc2("fc2", 10, 10, {1, dtype, Device()}),
        fc3("fc3", 10, 3, {1, dtype, Device()}) {}
  Tensor forward(const Tensor& x) override {
    ++calls;
    return fc3(tanh(fc2(tanh(fc1(x)))));
  }
  void members(MemberVisitor& visit) override {
    visit.module("fc1", fc1);
    visit.module("fc2", fc2);
    visit.module("fc3", fc3);
  }
  Linear fc1, fc2, fc3;
  int calls = 0;
};

inline Tensors grads_of(Module& module) {
  Tensors grads;
  for (const Tensor& parameter : module.parameters()) {
    grads.push_back(parameter.grad().defined() ? parameter.grad().clone()
                                               : Tensor());
  }
  return grads;
}

/// The gradients of a loss on one device; leaves none in the module.
inline Tensors take_grads(Module& module, const Tensor& loss) {
  loss.backward();
  Tensors grads = grads_of(module);
  module.clear_grad();
  return grads;
}

inline double max_relative(const Tensors& a, const Tensors& b) {
  EXPECT_EQ(a.size(), b.size());
  double worst = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!a[i].defined() || !b[i].defined()) {
      EXPECT_EQ(a[i].defined(), b[i].defined()) << "gradient " << i;
      continue;
    }
    double scale = 1e-300;
    for (double v : b[i].to_vector<double>()) {
      scale = std::max(scale, std::abs(v));
    }
    worst = std::max(worst, max_abs_difference(a[i], b[i]) / scale);
  }
  return worst;
}

inline Options tiny_options(int n, std::int64_t batch) {
  Options options;
  options.chapter = "01_data_parallel";
  options.world_size = n;
  options.batch = batch;
  options.seq = 6;
  options.data = "random";
  options.dtype = DType::kF64;
  options.steps = 3;
  return options;
}

inline ModelConfig tiny_gpt(double dropout = 0) {
  ModelConfig config{"gpt2", 32, 8, 8, 2, 2};
  config.dropout = dropout;
  return config;
}

/// On 1, 2, ... devices.
class DataParallelParity : public testing::TestWithParam<int> {};

}  // namespace shardbook::data_parallel::test
