#pragma once

// What tests of plans share: a small MLP, and parameters by name.

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "chapters/11_dtensor/parallelize.h"
#include "core/layers.h"
#include "tests/chapters/11_dtensor/dtensor_support.h"
#include "tests/support/larger.h"

namespace shardbook::dtensor_test {

inline InitOptions f64_init() {
  InitOptions init;
  init.seed = 1;
  init.dtype = DType::kF64;
  return init;
}

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

/// Gradients of a parallelized model, whole: parameters become gradients.
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

}  // namespace shardbook::dtensor_test
