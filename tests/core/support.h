#pragma once

// Tensors of noise, and comparisons that report where they fail.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/autograd.h"
#include "core/context.h"
#include "core/layers.h"
#include "core/ops.h"
#include "core/tensor.h"
#include "tests/support/errors.h"

namespace shardbook {

/// Largest relative error of central differences in f64 with steps of 1e-6.
constexpr double kGradientTolerance = 1e-7;

inline InitOptions f64_init() {
  InitOptions init;
  init.dtype = DType::kF64;
  return init;
}

inline const TensorOptions kOfF64{DType::kF64, Device()};
inline const TensorOptions kOfF32{DType::kF32, Device()};
inline const TensorOptions kOfBF16{DType::kBF16, Device()};

/// The rank has a device of its own while this lives: nobody else has memory
/// there.
struct OwnDevice {
  Device device = Device::cpu();
  RankContext context{device};
  RankContext::Scope scope{context};
};

inline AttentionOptions attention_of(std::int64_t heads, bool causal = true,
                                     double dropout = 0) {
  AttentionOptions options;
  options.heads = heads;
  options.causal = causal;
  options.dropout = dropout;
  return options;
}

/// The operations that were begun.
struct SeenOps : Observer {
  void on_op_begin(const OpEvent& event) override { begun.push_back(event); }
  /// Of all operations with this name.
  double flops_of(const std::string& name) const {
    double flops = 0;
    for (const OpEvent& event : begun) {
      if (event.name == name) flops += event.flops;
    }
    return flops;
  }
  std::vector<OpEvent> begun;
};

/// Values without pattern in (low, high); the same for the same seed.
inline Tensor noise(const Shape& shape, std::uint64_t seed = 1, double low = -1,
                    double high = 1, const TensorOptions& options = kOfF64) {
  Tensor x = Tensor::empty(shape, options);
  fill_uniform(x, seed, stream_of("noise"), low, high);
  return x;
}

/// The same as a leaf that needs a gradient.
inline Tensor leaf(const Shape& shape, std::uint64_t seed = 1, double low = -1,
                   double high = 1, const TensorOptions& options = kOfF64) {
  return noise(shape, seed, low, high, options).set_requires_grad();
}

inline Tensor leaf_of(const std::vector<double>& values, const Shape& shape) {
  return Tensor::from_values<double>(values, shape).set_requires_grad();
}

/// A scalar in which every element of x counts differently.
inline Tensor weighted_sum(const Tensor& x) {
  return sum(mul(x, noise(x.shape(), 99, 0.5, 1.5, x.options())));
}

/// A gradient of ones.
inline Tensor ones_like(const Tensor& x) {
  return Tensor::full(x.shape(), 1, x.options());
}

/// The identity with this backward.
inline Tensor with_backward(
    const Tensor& x, const std::function<Tensors(const Tensors&)>& backward) {
  return autograd::custom_function(
      "with_backward", {x}, [](const Tensors& in) { return in; }, backward)[0];
}

/// A copy, which records that its backward runs.
inline Tensor noted(const Tensor& x, const std::string& name,
                    std::vector<std::string>* notes) {
  return autograd::custom_function(
      "noted", {x}, [](const Tensors& in) { return Tensors{in[0].clone()}; },
      [=](const Tensors& grads) {
        notes->push_back(name);
        return Tensors{grads[0]};
      })[0];
}

inline std::vector<double> values(const Tensor& x) {
  return x.to_vector<double>();
}

/// |a - b| <= tolerance * (1 + |b|) everywhere.
inline void expect_close(const std::vector<double>& a,
                         const std::vector<double>& b, double tolerance) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    ASSERT_NEAR(a[i], b[i], tolerance * (1.0 + std::fabs(b[i]))) << "at " << i;
  }
}

inline void expect_close(const Tensor& a, const Tensor& b, double tolerance) {
  ASSERT_EQ(a.shape(), b.shape());
  expect_close(values(a), values(b), tolerance);
}

/// The same for each tensor of two lists.
inline void expect_close(const Tensors& a, const Tensors& b, double tolerance) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    SCOPED_TRACE(testing::Message() << "tensor " << i);
    expect_close(a[i], b[i], tolerance);
  }
}

inline void expect_same_bits(const Tensors& a, const Tensors& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_TRUE(bitwise_equal(a[i], b[i])) << "tensor " << i;
  }
}

inline Tensors gradients_of(const Tensors& x) {
  Tensors result;
  for (const Tensor& each : x) result.push_back(each.grad());
  return result;
}

}  // namespace shardbook
