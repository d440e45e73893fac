#include "chapters/common/pipeline/stage_run.h"

#include <utility>

#include "core/autograd.h"

namespace shardbook {

StageRun run_forward(const StageFunction& stage, const Tensors& received,
                     const LayerInput& spec) {
  StageRun run;
  for (std::size_t i = 0; i < received.size(); ++i) {
    const bool needs_grad = i < spec.values.size()
                                ? spec.values[i].needs_grad
                                : is_floating(received[i].dtype());
    run.inputs.push_back(needs_grad ? autograd::graph_input(received[i])
                                    : received[i]);
  }
  run.outputs = stage(run.inputs);
  // The graph must not keep the outputs, which are only sent. It ends in a node
  // without elements, whose backward returns the outputs' gradients.
  Tensors ends;
  for (const Tensor& output : run.outputs) {
    run.needs_grad.push_back(output.requires_grad());
    if (output.requires_grad()) ends.push_back(output);
  }
  if (ends.empty()) return run;
  run.grad_outputs = std::make_shared<Tensors>();
  run.end = Tensor::empty({0});
  autograd::record(
      "stage", ends, {run.end},
      [grads = run.grad_outputs](const Tensors&) { return std::move(*grads); });
  return run;
}

StageRun run_forward(Module& stage, const Tensors& received,
                     const LayerInput& spec) {
  return run_forward([&](const Tensors& inputs) { return stage(inputs); },
                     received, spec);
}

StageRun run_forward_again(const StageFunction& stage, const Tensors& received,
                           const LayerInput& spec, const RandomState& random) {
  const ContextValue<RandomState> replay(&RankContext::random, random);
  const ContextValue<bool> flag(&RankContext::is_recomputing, true);
  return run_forward(stage, received, spec);
}

Tensors run_backward(StageRun run, Tensors grad_outputs) {
  run.outputs.clear();
  bool any = false;
  for (std::size_t i = 0; i < run.needs_grad.size(); ++i) {
    if (!run.needs_grad[i]) continue;
    any = any || grad_outputs[i].defined();
    run.grad_outputs->push_back(std::move(grad_outputs[i]));
  }
  grad_outputs.clear();
  if (any) autograd::backward({std::move(run.end)}, {Tensor::empty({0})});
  Tensors result;
  for (const Tensor& input : run.inputs) {
    result.push_back(input.requires_grad() ? input.grad() : Tensor());
    // A weight's gradient that waits may keep the input, and this with it
    if (input.requires_grad()) input.clear_grad();
  }
  return result;
}

}  // namespace shardbook
