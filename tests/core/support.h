#pragma once

// Tensors of noise, and comparisons that report where they fail.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
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

/// Values without pattern in (low, high); the same for the same seed.
inline Tensor noise(const Shape& shape, std::uint64_t seed = 1, double low = -1,
                    double high = 1,
                    const TensorOptions& options = {DType::kF64, Device()}) {
  Tensor x = Tensor::empty(shape, options);
  fill_uniform(x, seed, stream_of("noise"), low, high);
  return x;
}

/// The same as a leaf that needs a gradient.
inline Tensor leaf(const Shape& shape, std::uint64_t seed = 1, double low = -1,
                   double high = 1,
                   const TensorOptions& options = {DType::kF64, Device()}) {
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

/// The identity, which records that its backward runs.
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

}  // namespace shardbook
