#include "chapters/03_zero_fsdp/naive_zero3.h"

#include <algorithm>

#include "core/autograd.h"
#include "core/inplace.h"
#include "core/ops.h"

namespace shardbook::zero_fsdp {

NaiveZero3::NaiveZero3(const LayerList& layers, const InitOptions& init,
                       ProcessGroup& dp, const std::string& optimizer,
                       const OptimizerOptions& options)
    : layers_(layers), init_(init), dp_(dp) {
  // Keep this rank's part of each parameter; the rest goes with the layer
  Tensors parts;
  for (int i = 0; i < layers.size(); ++i) {
    const auto layer = layers.make(i, init);
    for (const NamedTensor& each : layer->named_parameters()) {
      if (shards_.count(each.name) != 0) continue;  // tied to an earlier one
      const std::int64_t n = each.tensor.numel();
      const std::int64_t size = (n + dp.size() - 1) / dp.size();
      const std::int64_t begin = std::min(n, dp.rank() * size);
      const std::int64_t end = std::min(n, begin + size);
      Tensor part = Tensor::zeros({size}, each.tensor.options());
      if (begin < end) {
        slice(part, 0, 0, end - begin)
            .copy_from(
                slice(reshape(each.tensor.detach(), {n}), 0, begin, end));
      }
      part.set_requires_grad();
      shards_[each.name] = {part, each.tensor.shape()};
      parts.push_back(part);
    }
  }
  optimizer_ = make_optimizer(optimizer, parts, options);
}

Tensor NaiveZero3::gather(const Shard& shard) {
  const Tensor part = shard.part.detach();
  Tensor all = Tensor::empty({dp_.size() * part.numel()}, part.options());
  dp_.all_gather(all, part, "gather").wait();
  return reshape(slice(all, 0, 0, shape_numel(shard.whole)), shard.whole);
}

std::unique_ptr<Module> NaiveZero3::gather(int layer) {
  InitOptions on_meta = init_;
  on_meta.device = Device::meta();
  auto module = layers_.make(layer, on_meta);
  const NoGrad no_grad;
  module->replace_tensors([this](const std::string& name, const Tensor&) {
    return gather(shards_.at(name)).set_requires_grad();
  });
  return module;
}

void NaiveZero3::reduce(Module& layer) {
  const NoGrad no_grad;
  for (const NamedTensor& each : layer.named_parameters()) {
    const Shard& shard = shards_.at(each.name);
    const std::int64_t n = each.tensor.numel(), size = shard.part.numel();
    Tensor all = Tensor::zeros({dp_.size() * size}, each.tensor.options());
    slice(all, 0, 0, n).copy_from(reshape(each.tensor.grad(), {n}));
    Tensor sum = Tensor::empty({size}, all.options());
    dp_.reduce_scatter(sum, all, ReduceOp::kSum, "reduce").wait();
    scale_into(sum, sum, 1.0 / dp_.size());
    if (shard.part.grad().defined()) {
      add_into(shard.part.grad(), sum);  // tied: the sum over its places
    } else {
      shard.part.set_grad(sum);
    }
  }
}

double NaiveZero3::step(const Tensor& inputs, const Tensor& targets) {
  // Forward: gather a layer, compute, free it, and keep its input
  Tensors kept;
  Tensor x = inputs;
  for (int i = 0; i + 1 < layers_.size(); ++i) {
    const NoGrad no_grad;
    kept.push_back(x);
    x = (*gather(i))(x);
  }
  kept.push_back(x);

  // Backward: gather it again, compute again, reduce its gradients, free it
  double mean_loss = 0;
  Tensor gradient;
  for (int i = layers_.size() - 1; i >= 0; --i) {
    const auto layer = gather(i);
    Tensor input = kept[static_cast<std::size_t>(i)].detach();
    if (is_floating(input.dtype())) input.set_requires_grad();
    Tensor output = (*layer)(input);
    if (i + 1 == layers_.size()) {
      output = language_loss(output, targets);
      mean_loss = output.item();
      gradient = Tensor::full({}, 1, output.options());
    }
    autograd::backward({output}, {gradient});
    gradient = input.grad();
    reduce(*layer);
    kept.pop_back();
  }

  // Update: each rank its own parts
  optimizer_->step();
  for (const Tensor& part : optimizer_->parameters()) part.clear_grad();
  return mean_loss;
}

std::vector<NamedTensor> NaiveZero3::full_parameters() {
  std::vector<NamedTensor> whole;
  for (const auto& [name, shard] : shards_) {
    whole.push_back({name, gather(shard)});
  }
  return whole;
}

}  // namespace shardbook::zero_fsdp
