#pragma once

// Common to tests of plans: a small MLP, and parameters by name.

#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "chapters/11_dtensor/parallelize.h"
#include "core/layers.h"
#include "tests/chapters/11_dtensor/dtensor_support.h"
#include "tests/support/larger.h"

namespace shardbook::dtensor_test {

inline Sequential make_mlp(std::int64_t in, std::int64_t hidden,
                           std::int64_t out) {
  Sequential model;
  model.add(Linear("0", in, hidden, f64_init()));
  model.add(Relu());
  model.add(Linear("2", hidden, out, f64_init()));
  return model;
}

/// Parameters, and gradients of parameters, by name.
using Named = std::map<std::string, Tensor>;

inline Named named(const std::vector<NamedTensor>& list) {
  Named map;
  for (const NamedTensor& each : list) map[each.name] = each.tensor;
  return map;
}

/// A parallelized model's gradients, whole, in place of its parameters.
inline Named whole_gradients(Module& model, const Mesh& mesh,
                             const std::vector<CutParameter>& cuts) {
  const auto grads = model.clone();
  grads->replace_tensors([](const std::string&, const Tensor& tensor) {
    return tensor.grad().defined() ? tensor.grad() : tensor.zeros_like();
  });
  return named(full_parameters(*grads, mesh, cuts));
}

inline double worst_error(const Named& got, Module& plain) {
  double worst = 0;
  for (const NamedTensor& each : plain.named_parameters()) {
    worst = larger(worst, error_between(got.at(each.name), each.tensor.grad()));
  }
  return worst;
}

/// One training step of make() and one of make() changed by `cut`, with equal
/// inputs and the sum of squared outputs as loss. Throws if outputs or
/// gradients differ; returns the calls.
template <typename Make>
std::string calls_of_equal_steps(
    const Make& make, const Tensor& input,
    const std::function<std::vector<CutParameter>(Module& model)>& cut,
    const Mesh& tp, const ProcessGroup& world, double tolerance = 1e-11) {
  auto plain = make(), model = make();
  const Tensor x = input.clone(), mine = input.clone();
  const bool has_gradient = input.dtype() == DType::kF64;
  x.set_requires_grad(has_gradient);
  mine.set_requires_grad(has_gradient);
  const Tensor right = plain(x);
  sum(square(right)).backward();

  const auto cuts = cut(model);
  const Tensor y = model(mine);
  sum(square(y)).backward();
  const std::string calls = log_since(world, 0);
  SB_CHECK(error_between(y, right) < tolerance, "forward");
  SB_CHECK(!has_gradient || error_between(mine.grad(), x.grad()) < tolerance,
           "input");
  SB_CHECK(worst_error(whole_gradients(model, tp, cuts), plain) < tolerance,
           "parameters");
  return calls;
}

/// The same for a plan.
template <typename Make>
std::string calls_of_equal_steps(const Make& make, const Tensor& input,
                                 const Plan& plan, const Mesh& tp,
                                 const ProcessGroup& world,
                                 double tolerance = 1e-11) {
  const auto cut = [&](Module& model) {
    return parallelize_module(model, tp, plan);
  };
  return calls_of_equal_steps(make, input, cut, tp, world, tolerance);
}

}  // namespace shardbook::dtensor_test
