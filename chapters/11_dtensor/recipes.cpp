#include "chapters/11_dtensor/recipes.h"

#include <memory>

#include "chapters/11_dtensor/dtensor_ops.h"
#include "core/context.h"
#include "core/ops.h"

namespace shardbook::dtensor {
namespace {

// All parameters end to end.
Tensor flattened(Module& module) {
  NoGrad no_grad;
  Tensors rows;
  for (const Tensor& parameter : module.parameters()) {
    rows.push_back(reshape(parameter.detach(), {parameter.numel()}));
  }
  return concat(rows, 0);
}

std::vector<Shape> shapes_of(Module& module) {
  std::vector<Shape> shapes;
  for (const Tensor& parameter : module.parameters()) {
    shapes.push_back(parameter.shape());
  }
  return shapes;
}

}  // namespace

Tensor borrowed(const Tensor& parameter, const Mesh& dp,
                const Placement& placement, const Shape& whole) {
  if (dp.shape()[0] == 1) return parameter;
  return from_local(parameter, dp, {placement}, whole)
      .redistribute({replicate()})
      .to_local({partial()});
}

void lend_parameters(Module& module, const Mesh& dp, const Placement& placement,
                     const std::vector<Shape>& whole,
                     const std::function<void(Module&)>& inside) {
  const auto own = std::make_shared<Tensors>();
  const auto lend = [dp, placement, whole, own](Module& module, Tensors&) {
    own->clear();
    module.replace_tensors([&](const std::string&, const Tensor& tensor) {
      own->push_back(tensor);
      return borrowed(tensor, dp, placement,
                      whole.empty() ? tensor.shape() : whole[own->size() - 1]);
    });
  };
  const auto take_back = [own](Module& module, Tensors&) {
    std::size_t next = 0;
    module.replace_tensors(
        [&](const std::string&, const Tensor&) { return (*own)[next++]; });
  };
  const bool is_needed = dp.shape()[0] > 1;
  if (is_needed) module.add_forward_pre_hook(lend);
  inside(module);
  if (is_needed) module.add_forward_hook(take_back);
}

void replicate_parameters(Module& model, const Mesh& dp) {
  for (const NamedModule& each : model.named_modules()) {
    const bool is_layer = each.module->named_modules().size() == 1;
    if (is_layer && !each.module->parameters().empty()) {
      lend_parameters(*each.module, dp, replicate());
    }
  }
}

FlatUnit::FlatUnit(Module& module, const Mesh& dp)
    : module_(module),
      shapes_(shapes_of(module)),
      flat_(dtensor::make_parameter(flattened(module), dp, {shard(0)})) {}

Tensor FlatUnit::operator()(const Tensor& x) {
  const Tensor whole =
      flat_().redistribute({replicate()}).to_local({partial()});
  std::int64_t next = 0;
  std::size_t index = 0;
  module_.replace_tensors([&](const std::string&, const Tensor&) {
    const Shape& shape = shapes_[index++];
    const std::int64_t begin = next;
    next += shape_numel(shape);
    return reshape(slice(whole, 0, begin, next), shape);
  });
  return module_(x);
}

Tensor global_mean(const Tensor& local_mean, const Mesh& dp) {
  const std::int64_t ranks = dp.shape()[0];
  // One mean per rank: the gradient of each is 1/d
  const DTensor means =
      from_local(reshape(local_mean, {1}), dp, {shard(0)}, Shape{ranks});
  return mean(means, 0).full_tensor();
}

}  // namespace shardbook::dtensor
