#include "core/autograd.h"

#include <algorithm>
#include <cmath>
#include <unordered_set>
#include <utility>

#include "core/check.h"
#include "core/context.h"
#include "core/internal/graph.h"
#include "core/internal/graph_task.h"
#include "core/internal/tensor_impl.h"
#include "core/internal/transfers.h"

namespace shardbook {
namespace autograd {

bool needs_grad(const Tensors& inputs) {
  if (!RankContext::current().grad_enabled) return false;
  return std::any_of(inputs.begin(), inputs.end(), [](const Tensor& tensor) {
    return tensor.requires_grad();
  });
}

void record(const char* name, const Tensors& inputs, const Tensors& outputs,
            BackwardFn backward) {
  if (needs_grad(inputs)) attach(name, inputs, outputs, std::move(backward));
}

Tensors custom_function(const char* name, const Tensors& inputs,
                        const std::function<Tensors(const Tensors&)>& forward,
                        BackwardFn backward) {
  Tensors outputs;
  {
    NoGrad no_grad;
    outputs = forward(inputs);
  }
  // An output that is an input (or a leaf) must not be rewired: pass a view.
  for (Tensor& output : outputs) {
    if (output.defined()) output = output.detach();
  }
  record(name, inputs, outputs, std::move(backward));
  return outputs;
}

void backward(const Tensors& outputs, const Tensors& grad_outputs,
              bool retain_graph) {
  SB_CHECK(!outputs.empty(), "backward: no outputs were given");
  SB_CHECK(grad_outputs.empty() || grad_outputs.size() == outputs.size(),
           "backward: ", grad_outputs.size(), " gradients for ", outputs.size(),
           " outputs");
  Tensors grads = grad_outputs;
  grads.resize(outputs.size());
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (!grads[i].defined()) {
      SB_CHECK(outputs[i].numel() == 1, "backward: an output of shape ",
               shape_text(outputs[i].shape()),
               " is not a scalar and needs a gradient to start from");
      grads[i] = Tensor::full(outputs[i].shape(), 1, outputs[i].options());
    }
    SB_CHECK(grads[i].dtype() == outputs[i].dtype() &&
                 grads[i].shape() == outputs[i].shape(),
             "backward: a gradient ", dtype_name(grads[i].dtype()),
             shape_text(grads[i].shape()), " for an output ",
             dtype_name(outputs[i].dtype()), shape_text(outputs[i].shape()));
  }
  GraphTask task(retain_graph, RankContext::current().graph_task);
  task.run(outputs, std::move(grads));
}

namespace {

/// Owned by the backward; when an exception drops it, it calls `failed`.
struct BackwardEnd {
  BackwardEnd(std::function<void()> on_end, std::function<void()> on_failure)
      : ended(std::move(on_end)), failed(std::move(on_failure)) {}
  ~BackwardEnd() {
    if (failed) failed();
  }
  std::function<void()> ended, failed;
};

}  // namespace

void at_end_of_backward(std::function<void()> ended,
                        std::function<void()> failed) {
  GraphTask* task = RankContext::current().graph_task;
  SB_CHECK(task != nullptr, "at_end_of_backward: no backward is running");
  const auto end =
      std::make_shared<BackwardEnd>(std::move(ended), std::move(failed));
  task->add_callback([end] {
    end->ended();
    end->failed = nullptr;
  });
}

Tensor graph_input(const Tensor& x) {
  Tensor leaf = x.detach();
  leaf.set_requires_grad();
  leaf.impl()->meta->grad_kind = MemoryKind::kActivation;
  return leaf;
}

Tensors reachable_leaves(const Tensors& outputs) {
  Tensors leaves;
  std::unordered_set<Node*> seen;
  std::vector<Node*> stack;
  auto visit = [&](const Edge& edge) {
    if (edge.node && seen.insert(edge.node.get()).second) {
      stack.push_back(edge.node.get());
    }
  };
  for (const Tensor& output : outputs) visit(edge_to(output));
  while (!stack.empty()) {
    Node* node = stack.back();
    stack.pop_back();
    if (node->leaf.defined()) leaves.push_back(node->leaf);
    for (const Edge& edge : node->next) visit(edge);
  }
  return leaves;
}

Tensors recompute(const std::function<Tensors(const Tensors&)>& function,
                  const Tensors& inputs) {
  RankContext& context = RankContext::current();
  if (!context.grad_enabled) return function(inputs);
  const RandomState random = context.random;
  Tensors outputs;
  {
    NoGrad no_grad;
    outputs = function(inputs);
  }
  for (Tensor& output : outputs) output = output.detach();

  auto backward_fn = [function, inputs, random](const Tensors& grads) {
    RankContext& now = RankContext::current();
    Tensors leaves;
    for (const Tensor& input : inputs) {
      leaves.push_back(input.requires_grad() ? graph_input(input)
                                             : input.detach());
    }
    Tensors again;
    {
      ContextValue<RandomState> replay(&RankContext::random, random);
      ContextValue<bool> record_again(&RankContext::grad_enabled, true);
      ContextValue<bool> flag(&RankContext::is_recomputing, true);
      PhaseScope phase(Phase::kForward);
      again = function(leaves);
    }
    Tensors roots, root_grads;
    for (std::size_t i = 0; i < again.size(); ++i) {
      if (!grads[i].defined() || !again[i].requires_grad()) continue;
      roots.push_back(again[i]);
      root_grads.push_back(grads[i]);
    }
    again.clear();
    if (!roots.empty()) {
      GraphTask task(/*retain_graph=*/false, now.graph_task);
      task.run(std::move(roots), std::move(root_grads));
    }
    Tensors grad_inputs;
    for (const Tensor& leaf : leaves) grad_inputs.push_back(leaf.grad());
    return grad_inputs;
  };
  // Recorded even when no input needs a gradient: parameters may.
  attach("recompute", inputs, outputs, std::move(backward_fn));
  return outputs;
}

double check_gradients(const std::function<Tensor(const Tensors&)>& function,
                       const Tensors& inputs, double epsilon) {
  for (const Tensor& input : inputs) input.clear_grad();
  function(inputs).backward();
  double worst = 0;
  NoGrad no_grad;
  for (const Tensor& input : inputs) {
    if (!input.requires_grad()) continue;
    SB_CHECK(input.dtype() == DType::kF64,
             "check_gradients: inputs are f64, this one is ",
             dtype_name(input.dtype()));
    const Tensor grad = input.grad();
    const std::vector<double> analytic =
        grad.defined()
            ? grad.to_vector<double>()
            : std::vector<double>(static_cast<std::size_t>(input.numel()), 0.0);
    const std::vector<double> x = input.to_vector<double>();
    for (std::int64_t i = 0; i < input.numel(); ++i) {
      const double saved = x[static_cast<std::size_t>(i)];
      const auto set = [&input, i](double value) {
        internal::write_from_host(input.flat_view(i, {1}), &value);
      };
      set(saved + epsilon);
      const double above = function(inputs).item();
      set(saved - epsilon);
      const double below = function(inputs).item();
      set(saved);
      const double numeric = (above - below) / (2 * epsilon);
      const double a = analytic[static_cast<std::size_t>(i)];
      worst =
          std::max(worst, std::abs(a - numeric) /
                              std::max({1.0, std::abs(a), std::abs(numeric)}));
    }
  }
  return worst;
}

}  // namespace autograd

void Tensor::add_grad_hook(GradHook hook) const {
  SB_CHECK(requires_grad() && !is_leaf(),
           "add_grad_hook: for results of operations that need a gradient; "
           "leaves take add_accumulate_hook");
  const autograd::Edge edge = autograd::edge_to(*this);
  edge.node->output_hooks[edge.output_index].push_back(std::move(hook));
}

}  // namespace shardbook
