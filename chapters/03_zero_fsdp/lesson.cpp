// ZeRO-3 on one screen: each rank holds 1/d of every parameter. A layer is
// whole only while it computes.
//
//   ./shardbook lesson zero
// Needed: 02_ddp. Next: 04_model_parallel.

#include "chapters/common/lesson.h"
#include "chapters/common/pipeline/stages.h"

namespace shardbook::zero_fsdp {

using lesson::Parts;

// --- the strategy
// Gather: the parts of all ranks, end to end, are the parameter.
inline std::unique_ptr<Module> gather(const LayerList& layers, int i,
                                      const Parts& parts, ProcessGroup& dp) {
  const NoGrad no_grad;
  auto layer = layers.make(i, lesson::no_values());
  layer->replace_tensors([&](const std::string& name, const Tensor& empty) {
    const Tensor mine = parts.at(name).detach();
    Tensor whole = Tensor::empty(empty.shape(), mine.options());
    dp.all_gather(whole, mine, "gather").wait();
    return whole.set_requires_grad();
  });
  return layer;
}

// Scatter: each rank keeps its part of the mean of the gradients.
inline void scatter_gradients(Module& layer, const Parts& parts,
                              ProcessGroup& dp) {
  for (const NamedTensor& each : layer.named_parameters()) {
    const Tensor& mine = parts.at(each.name);
    const Tensor gradient = each.tensor.grad();
    scale_into(gradient, gradient, 1.0 / dp.size());
    Tensor sum = mine.detach().empty_like();
    dp.reduce_scatter(sum, gradient, ReduceOp::kSum, "reduce").wait();
    // A tied parameter has a gradient from each of its layers
    autograd::accumulate_gradient(mine, sum);
  }
}

inline Tensor forward_backward(const LayerList& layers, const Parts& parts,
                               const Batch& batch, ProcessGroup& dp) {
  // Forward: gather a layer, compute, free it, and keep its input
  Tensors kept = {batch.inputs};
  for (int i = 0; i + 1 < layers.size(); ++i) {
    const NoGrad no_graph;
    kept.push_back((*gather(layers, i, parts, dp))(kept.back()));
  }
  // Backward: gather it again, compute again, and let go of its gradients
  Tensor loss, gradient;
  for (int i = layers.size() - 1; i >= 0; --i) {
    const auto layer = gather(layers, i, parts, dp);
    const Tensor x = i > 0 ? autograd::graph_input(kept.back()) : kept.back();
    Tensor y = (*layer)(x);
    if (!loss.defined()) loss = y = language_loss(y, batch.targets);
    autograd::backward({y}, gradient.defined() ? Tensors{gradient} : Tensors{});
    scatter_gradients(*layer, parts, dp);
    gradient = x.grad();
    kept.pop_back();
  }
  return loss;
}
// --- end

inline lesson::Result train(ProcessGroup& dp) {
  // 1. One part of every parameter; no rank keeps the model
  const auto layers = layers_of(lesson::config());
  Parts parts;
  for (int i = 0; i < layers->size(); ++i) {
    const auto layer = layers->make(i, lesson::init());
    for (const auto& [name, whole] : layer->named_parameters()) {
      if (parts.count(name) != 0) continue;  // tied to an earlier layer
      const std::int64_t n = whole.numel() / dp.size();  // sizes divide
      parts[name] = whole.flat_view(dp.rank() * n, {n}).clone();
      parts[name].set_requires_grad();
    }
  }
  // 2. The state of the optimizer is 1/d as well
  const auto optimizer = lesson::sgd(lesson::values_of(parts));
  double loss = 0;
  for (int step = 0; step < lesson::kSteps; ++step) {
    // 3. Its own samples, layer by layer
    const Batch batch = lesson::batch(step, dp.rank(), dp.size());
    const Tensor mean = forward_backward(*layers, parts, batch, dp);
    // 4. Each rank updates what it holds
    optimizer->step();
    lesson::clear_gradients(parts);
    loss = lesson::mean_over(mean, dp);
  }
  lesson::Result result = lesson::count(dp, loss);
  for (int i = 0; i < layers->size(); ++i) {
    const auto layer = gather(*layers, i, parts, dp);
    for (const auto& w : layer->named_parameters()) result.weights.push_back(w);
  }
  return result;
}

/// Ten steps send two gathers (of the last layer one) and one scatter of each
/// layer, and an all-reduce of the loss.
inline double bill(int /*rank*/, int d) {
  const auto layers = layers_of(lesson::config());
  double elements = 2;
  for (int i = 0; i < layers->size(); ++i) {
    const double n = layers->make(i, lesson::no_values())->num_parameters();
    elements += (i + 1 < layers->size() ? 3 : 2) * n;
  }
  return lesson::kSteps * elements * (d - 1) / d * 8;
}

inline lesson::Lesson this_lesson() {
  return {/*ranks=*/{4, 2}, train, bill, nullptr, /*peak_bytes=*/373208};
}

}  // namespace shardbook::zero_fsdp

#if __INCLUDE_LEVEL__ == 0
int main() { return compare(shardbook::zero_fsdp::this_lesson()); }
#endif
