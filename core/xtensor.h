#pragma once

// Tensors as xtensor expressions: slices, masks, reductions and .npy files.
//
//   auto w = as_xtensor<float>(layer.weight);      // no copy
//   xt::view(w, xt::all(), xt::range(0, 2)) = 0;   // writes the weight
//   double mean = xt::mean(w)();
//   Tensor rows = from_xtensor(xt::sum(w, {1}));
//   save_npy("w.npy", layer.weight);               // numpy.load("w.npy")
//
// A view keeps its tensor alive. It reads and writes memory directly: autograd
// does not see it, and an operation that runs later on the tensor may leave the
// view out of date, so take it, use it, and drop it. No other public header
// includes this one, whose templates take seconds to compile.

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>
#include <xtensor/xadapt.hpp>
#include <xtensor/xarray.hpp>
#include <xtensor/xmath.hpp>
#include <xtensor/xview.hpp>

#include "core/check.h"
#include "core/tensor.h"

namespace shardbook {

/// The tensor's values, in its shape, row-major, without a copy. T is the C++
/// type of its dtype: double, float, std::int64_t or std::int32_t. Throws Error
/// for another type and for tensors that are not in host memory.
template <typename T>
auto as_xtensor(const Tensor& tensor) {
  SB_CHECK(tensor.device().type() == DeviceType::kCpu,
           "as_xtensor: the tensor is on ", tensor.device().name(),
           "; its values are not in host memory");
  const std::vector<std::size_t> shape(tensor.shape().begin(),
                                       tensor.shape().end());
  return xt::adapt_smart_ptr(tensor.data<T>(), shape, tensor.impl_ptr());
}

/// A tensor with the values of an expression, evaluated once. Its dtype is the
/// expression's: f64, f32 or i32; i64 for all other integers, and for masks.
/// On the current device unless `device` says otherwise.
template <typename E>
Tensor from_xtensor(const xt::xexpression<E>& expression,
                    const Device& device = Device()) {
  using Value = std::decay_t<typename E::value_type>;
  using T = std::conditional_t<std::is_floating_point_v<Value> ||
                                   std::is_same_v<Value, std::int32_t>,
                               Value, std::int64_t>;
  const xt::xarray<T> values = expression.derived_cast();
  return Tensor::from_values(
      std::vector<T>(values.begin(), values.end()),
      Shape(values.shape().begin(), values.shape().end()), device);
}

/// Writes a tensor as NumPy's .npy, whole or not at all; bf16 and f16 as f32.
/// Throws Error that names the path and the cause.
void save_npy(const std::string& path, const Tensor& tensor);

/// Reads NumPy's .npy: f64 and f32 as they are, i32, and all other integers as
/// i64. Throws Error that names the path and what is wrong.
Tensor load_npy(const std::string& path, const Device& device = Device());

}  // namespace shardbook
