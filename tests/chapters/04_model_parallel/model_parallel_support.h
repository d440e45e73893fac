#pragma once

// A ResNet small enough to be trained in two halves by every test.

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>

#include "chapters/04_model_parallel/model_parallel_strategy.h"
#include "chapters/common/run/options.h"
#include "core/check.h"
#include "tests/support/errors.h"

namespace shardbook::model_parallel::test {

// A ResNet of two bottlenecks on each side of the cut.
inline const char* const kTiny =
    R"({"model_type": "resnet", "depths": [1, 1, 1, 1],
    "layer_type": "bottleneck", "embedding_size": 4, "num_labels": 7})";

inline Options tiny_options(DType dtype = DType::kF32) {
  Options options;
  options.chapter = "04_model_parallel";
  options.world_size = 2;
  options.model = kTiny;
  options.dtype = dtype;
  options.data = "random";
  options.batch = 10;
  options.seq = 1;
  options.image_size = 32;
  options.steps = 3;
  options.optimizer = "sgd";
  options.optimizer_options.lr = 0.1;
  options.deterministic = true;
  options.cluster = "none";
  return options;
}

/// Two devices, the first the current one, for the length of a test.
struct TwoDevices {
  explicit TwoDevices(bool on_shapes = false)
      : all(on_shapes ? std::vector<Device>{Device::meta(0), Device::meta(1)}
                      : std::vector<Device>{Device::cpu(0), Device::cpu(1)}),
        context(all[0], 0, 1),
        scope(context) {
    context.deterministic = true;
  }
  std::vector<Device> all;
  RankContext context;
  RankContext::Scope scope;
};

/// The results of a training run.
struct Outcome {
  std::vector<double> losses;
  Tensor output;                    // of one more forward
  std::vector<NamedTensor> values;  // parameters and running statistics
  std::vector<std::vector<CommRecord>> records;
};

inline Outcome run(const Options& options, const Settings& settings) {
  std::vector<Device> devices;
  for (int i = 0; i < settings.num_devices(); ++i) {
    devices.push_back(Device::cpu(i));
  }
  RankContext context(devices[0], 0, 1);
  context.deterministic = true;
  RankContext::Scope scope(context);
  ModelParallelStrategy strategy(options, settings, devices, 1);
  Outcome outcome;
  outcome.losses =
      train(options, strategy.optimizer(), false, [&](std::int64_t step) {
        return strategy.step(strategy.batch(step));
      }).losses;
  if (strategy.copies() != nullptr) {
    for (const Device& device : devices) {
      outcome.records.push_back(strategy.copies()->records(device));
    }
  }
  for (int i = 0; i < settings.num_devices(); ++i) {
    for (const auto& each : strategy.part(i).named_parameters()) {
      outcome.values.push_back(each);
    }
    for (const auto& each : strategy.part(i).named_buffers()) {
      outcome.values.push_back(each);
    }
  }
  NoGrad no_grad;
  outcome.output = strategy.forward(strategy.batch(0).inputs);
  return outcome;
}

inline const NamedTensor& find(const Outcome& outcome,
                               const std::string& name) {
  for (const NamedTensor& each : outcome.values) {
    if (each.name == name) return each;
  }
  SB_FAIL("no value '", name, "'");
}

inline void expect_same_bits(const Outcome& a, const Outcome& b) {
  EXPECT_EQ(a.losses, b.losses);
  EXPECT_TRUE(bitwise_equal(a.output, b.output));
  ASSERT_EQ(a.values.size(), b.values.size());
  for (const NamedTensor& each : a.values) {
    EXPECT_TRUE(bitwise_equal(each.tensor, find(b, each.name).tensor))
        << each.name;
  }
}

inline double relative_difference(const Tensor& a, const Tensor& b) {
  const auto x = a.to_vector<double>(), y = b.to_vector<double>();
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    difference += (x[i] - y[i]) * (x[i] - y[i]);
    norm += y[i] * y[i];
  }
  return norm == 0 ? std::sqrt(difference) : std::sqrt(difference / norm);
}

}  // namespace shardbook::model_parallel::test
