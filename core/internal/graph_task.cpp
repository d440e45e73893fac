#include "core/internal/graph_task.h"

#include <atomic>
#include <thread>
#include <unordered_set>

#include "core/check.h"
#include "core/context.h"
#include "core/internal/kernel_orders.h"
#include "core/internal/op_scope.h"
#include "core/internal/tensor_impl.h"
#include "core/tensor_storage.h"

namespace shardbook::autograd {

// Long graphs must not be freed by recursion, one frame per node.
Node::~Node() {
  std::vector<std::shared_ptr<Node>> pending;
  auto take_next = [&pending](Node& node) {
    for (Edge& edge : node.next) {
      if (edge.node && edge.node.use_count() == 1) {
        pending.push_back(std::move(edge.node));
      }
    }
    node.next.clear();
  };
  backward = nullptr;
  take_next(*this);
  while (!pending.empty()) {
    std::shared_ptr<Node> node = std::move(pending.back());
    pending.pop_back();
    node->backward = nullptr;
    take_next(*node);
  }
}

namespace {

// Later nodes first. The numbers only order nodes of one graph, so one counter
// may serve every rank of the process.
std::uint64_t next_sequence() {
  static std::atomic<std::uint64_t> counter{1};
  return counter.fetch_add(1, std::memory_order_relaxed);
}

std::shared_ptr<Node> accumulator_of(const Tensor& leaf) {
  Meta& meta = leaf.impl()->grad_meta();
  std::shared_ptr<Node> node = meta.accumulator.lock();
  if (node == nullptr) {
    node = std::make_shared<Node>();
    node->name = "accumulate";
    // Leaves run as soon as they are ready: hooks must see gradients early.
    node->sequence = ~std::uint64_t{0};
    node->device = leaf.device();
    node->leaf = leaf;
    node->output_hooks.resize(1);
    node->output_kinds.emplace_back(leaf.dtype(), leaf.shape());
    meta.accumulator = node;
  }
  return node;
}

}  // namespace

Edge edge_to(const Tensor& tensor) {
  if (!tensor.requires_grad()) return {};
  Meta& meta = *tensor.impl()->meta;
  if (meta.grad_fn != nullptr) return {meta.grad_fn, meta.output_index};
  return {accumulator_of(tensor), 0};
}

void attach(const char* name, const Tensors& inputs, const Tensors& outputs,
            BackwardFn backward) {
  auto node = std::make_shared<Node>();
  node->name = name;
  node->sequence = next_sequence();
  node->device = outputs[0].device();
  node->output_hooks.resize(outputs.size());
  node->output_kinds.resize(outputs.size());
  node->backward = std::move(backward);
  node->next.reserve(inputs.size());
  for (const Tensor& input : inputs) node->next.push_back(edge_to(input));
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (!outputs[i].defined() || !is_floating(outputs[i].dtype())) continue;
    node->output_kinds[i] = {outputs[i].dtype(), outputs[i].shape()};
    Meta& meta = outputs[i].impl()->grad_meta();
    meta.grad_fn = node;
    meta.output_index = i;
  }
}

// --- Backward ----------------------------------------------------------------

namespace {

// The source of the gradients that backward starts from.
constexpr std::uint64_t kRoot = ~std::uint64_t{0};

// a + b, into a's array when `in_place`.
Tensor sum_of(const Tensor& a, const Tensor& b, bool in_place) {
  SB_CHECK(a.shape() == b.shape(), "backward: gradients of shapes ",
           shape_text(a.shape()), " and ", shape_text(b.shape()),
           " meet at one tensor");
  Tensor result = in_place ? a : a.empty_like();
  internal::OpScope scope("add", static_cast<double>(a.numel()),
                          internal::bytes_of({&a, &b, &result}), a);
  if (scope.runs()) internal::add_elements(scope.kernels(), a, b, result);
  return result;
}

void check_gradient(const char* name, const Tensor& grad, const Edge& edge) {
  const auto& [dtype, shape] = edge.node->output_kinds[edge.output_index];
  SB_CHECK(grad.dtype() == dtype && grad.shape() == shape, "backward of '",
           name, "': a gradient ", dtype_name(grad.dtype()),
           shape_text(grad.shape()), " for an input ", dtype_name(dtype),
           shape_text(shape));
}

}  // namespace

// Adds `grad` to the leaf's gradient in place: views of the gradient stay views.
// The sum may be wider than the parameter.
void accumulate_gradient(const Tensor& leaf, Tensor grad) {
  Meta& meta = leaf.impl()->grad_meta();
  if (meta.grad.defined()) {
    if (meta.grad.dtype() != grad.dtype()) {
      Tensor wide = meta.grad.empty_like();
      wide.copy_from(grad);
      grad = wide;
    }
    meta.grad = sum_of(meta.grad, grad, /*in_place=*/true);
  } else if (meta.grad_buffer.defined()) {
    meta.grad_buffer.copy_from(grad);
    meta.grad = meta.grad_buffer;
  } else {
    MemoryScope kind(meta.grad_kind);
    meta.grad = internal::is_sole_owner(grad) ? std::move(grad) : grad.clone();
    set_memory_kind(meta.grad, meta.grad_kind);
  }
  // A hook may add or remove hooks.
  const auto hooks = meta.accumulate_hooks;
  Tensor parameter = leaf;
  for (const auto& [key, hook] : hooks) hook(parameter);
}

// Counts, for every node below the roots, how many gradients it will receive.
void GraphTask::discover(const std::vector<std::shared_ptr<Node>>& roots) {
  std::vector<Node*> stack;
  std::unordered_set<Node*> seen;
  auto visit = [&](Node* node) {
    if (!seen.insert(node).second) return;
    SB_CHECK(!node->freed, "backward: the graph of '", node->name,
             "' was freed by an earlier backward; keep it with retain_graph");
    inputs_[node].grads.resize(node->output_hooks.size());
    if (queue_of(node->device) == devices_.size()) {
      devices_.push_back(node->device);
    }
    stack.push_back(node);
  };
  for (const auto& root : roots) visit(root.get());
  while (!stack.empty()) {
    Node* node = stack.back();
    stack.pop_back();
    for (std::size_t i = 0; i < node->next.size(); ++i) {
      Node* next = node->next[i].node.get();
      if (next == nullptr) continue;
      visit(next);
      Inputs& inputs = inputs_[next];
      inputs.missing += 1;
      inputs.expected.push_back(
          {node->sequence, i, node->next[i].output_index});
      inputs.all_from_here &= node->device == next->device;
    }
  }
  if (devices_.size() > 1) order_expected();
  ready_.resize(devices_.size());
  unfinished_ = static_cast<std::int64_t>(seen.size());
}

// Gradients are added in the order in which one device would make them: from
// later nodes first. Threads that record for several devices at the same time
// number their nodes in any order. Where their gradients meet, the outputs are
// summed one after another, the last one first: the nodes that send gradients
// to one output come from one thread.
void GraphTask::order_expected() {
  for (auto& [node, inputs] : inputs_) {
    const bool by_output = !inputs.all_from_here;
    std::sort(inputs.expected.begin(), inputs.expected.end(),
              [by_output](const Source& a, const Source& b) {
                if (by_output && a.output_index != b.output_index) {
                  return a.output_index > b.output_index;
                }
                return a.from != b.from ? a.from > b.from : a.input < b.input;
              });
  }
}

// Adds one gradient to the sum of a node's output. Devices run at their own
// pace: among several, a gradient waits for the ones that one device would have
// made earlier, so the sum does not depend on the order of arrival.
void GraphTask::deliver(const Edge& edge, const Tensor& grad,
                        std::uint64_t from, std::size_t input) {
  Inputs& inputs = inputs_[edge.node.get()];
  if (devices_.size() > 1 && from != kRoot) {
    inputs.arrivals.push_back({{from, input, edge.output_index}, grad});
  } else if (grad.defined()) {
    add_to(inputs.grads[edge.output_index], grad);
  }
}

void GraphTask::add_to(Tensor& slot, const Tensor& grad) {
  if (!slot.defined()) {
    slot = grad;
  } else {
    slot = sum_of(slot, grad, internal::is_sole_owner(slot));
  }
}

// Adds the gradients that have arrived and are next in order, so that a weight
// used many times need not keep all of its gradients. Only the thread of the
// node's device adds.
void GraphTask::add_what_came(Node& node) {
  Inputs& inputs = inputs_.at(&node);
  for (;;) {
    Arrival next;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (inputs.num_added == inputs.expected.size()) return;
      const Source& source = inputs.expected[inputs.num_added];
      const auto found =
          std::find_if(inputs.arrivals.begin(), inputs.arrivals.end(),
                       [&source](const Arrival& arrival) {
                         return arrival.source.from == source.from &&
                                arrival.source.input == source.input;
                       });
      if (found == inputs.arrivals.end()) return;
      next = std::move(*found);
      inputs.arrivals.erase(found);
      ++inputs.num_added;
    }
    if (next.grad.defined()) {
      add_to(inputs.grads[next.source.output_index], next.grad);
    }
  }
}

Tensors GraphTask::take_gradients(Node& node) {
  if (devices_.size() > 1) add_what_came(node);
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::move(inputs_[&node].grads);
}

// One of the gradients a node waits for has arrived (or is known to be zero).
void GraphTask::arrive(const Edge& edge) {
  Inputs& inputs = inputs_[edge.node.get()];
  if (--inputs.missing == 0) {
    ready_[queue_of(edge.node->device)].push(edge.node);
  }
}

void GraphTask::execute(const std::shared_ptr<Node>& node) {
  Tensors grads = take_gradients(*node);
  bool any = false;
  for (std::size_t i = 0; i < grads.size(); ++i) {
    if (!grads[i].defined()) continue;
    any = true;
    for (const GradHook& hook : node->output_hooks[i]) {
      if (Tensor replaced = hook(grads[i]); replaced.defined()) {
        grads[i] = replaced;
      }
    }
  }

  Tensors grad_inputs;
  if (node->leaf.defined()) {
    if (any) {
      Tensor grad = std::move(grads[0]);
      grads.clear();
      accumulate_gradient(node->leaf, std::move(grad));
    }
  } else {
    if (any) {
      grad_inputs = node->backward(grads);
      SB_CHECK(grad_inputs.size() == node->next.size(), "backward of '",
               node->name, "': ", grad_inputs.size(), " gradients for ",
               node->next.size(), " inputs");
      for (std::size_t i = 0; i < grad_inputs.size(); ++i) {
        if (node->next[i].node == nullptr || !grad_inputs[i].defined())
          continue;
        check_gradient(node->name, grad_inputs[i], node->next[i]);
      }
    } else {
      grad_inputs.resize(node->next.size());
    }
    if (!retain_graph_) {
      node->backward = nullptr;
      node->freed = true;
    }
  }
  grads.clear();

  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (std::size_t i = 0; i < node->next.size(); ++i) {
      if (node->next[i].node == nullptr) continue;
      Tensor grad = std::move(grad_inputs[i]);
      deliver(node->next[i], grad, node->sequence, i);
      grad = Tensor();
      arrive(node->next[i]);
    }
    unfinished_ -= 1;
    changed_.notify_all();
  }
  if (devices_.size() == 1) return;
  // Gradients from other devices arrive at any time; they wait, so that the
  // same operations run at the same point every time.
  for (const Edge& edge : node->next) {
    if (edge.node != nullptr && inputs_.at(edge.node.get()).all_from_here) {
      add_what_came(*edge.node);
    }
  }
}

void GraphTask::work(const Device& device) {
  const std::size_t queue = queue_of(device);
  for (;;) {
    std::shared_ptr<Node> node;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] {
        return !ready_[queue].empty() || unfinished_ == 0 || error_;
      });
      if (error_ || ready_[queue].empty()) return;
      node = ready_[queue].top();
      ready_[queue].pop();
    }
    try {
      execute(node);
    } catch (...) {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!error_) error_ = std::current_exception();
      changed_.notify_all();
    }
  }
}

void GraphTask::run(Tensors outputs, Tensors grad_outputs) {
  std::vector<Edge> roots;
  std::vector<std::shared_ptr<Node>> root_nodes;
  for (const Tensor& output : outputs) {
    roots.push_back(edge_to(output));
    SB_CHECK(roots.back().node != nullptr, "backward: the output of shape ",
             shape_text(output.shape()),
             " depends on nothing that requires a gradient");
    root_nodes.push_back(roots.back().node);
  }
  discover(root_nodes);
  for (std::size_t i = 0; i < roots.size(); ++i) {
    deliver(roots[i], grad_outputs[i], kRoot, i);
  }
  outputs.clear();
  grad_outputs.clear();
  // A root that other roots lead to waits for them as well.
  std::unordered_set<Node*> started;
  for (const Edge& root : roots) {
    if (inputs_[root.node.get()].missing == 0 &&
        started.insert(root.node.get()).second) {
      ready_[queue_of(root.node->device)].push(root.node);
    }
  }

  RankContext& context = RankContext::current();
  ContextValue<GraphTask*> task(&RankContext::graph_task, this);
  PhaseScope phase(Phase::kBackward);
  NoGrad no_grad;
  MemoryScope kind(MemoryKind::kActivation);
  if (devices_.size() == 1) {
    work(devices_[0]);
  } else {
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < devices_.size(); ++i) {
      if (devices_[i] == context.device) continue;
      RankContext& worker = context.worker(devices_[i]);
      threads.emplace_back([this, i, &worker] {
        RankContext::Scope scope(worker);
        work(devices_[i]);
      });
    }
    if (queue_of(context.device) < devices_.size()) work(context.device);
    for (std::thread& thread : threads) thread.join();
  }
  if (error_) std::rethrow_exception(error_);
  for (std::size_t i = 0; i < callbacks_.size(); ++i) callbacks_[i]();
}

}  // namespace shardbook::autograd
