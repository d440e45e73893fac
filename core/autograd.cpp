#include "core/autograd.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <exception>
#include <map>
#include <mutex>
#include <queue>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "core/check.h"
#include "core/context.h"
#include "core/internal/kernel_orders.h"
#include "core/internal/op_scope.h"
#include "core/internal/tensor_impl.h"
#include "core/kernels/elementwise.h"

namespace shardbook {
namespace autograd {

struct Edge {
  std::shared_ptr<Node> node;  // null: this input needs no gradient
  std::size_t output_index = 0;
};

/// One operation of the graph, or (with `leaf`) the end of a path.
class Node {
 public:
  const char* name = "";
  std::uint64_t sequence = 0;
  Device device;
  std::vector<Edge> next;
  std::vector<std::vector<GradHook>> output_hooks;
  /// What the outputs' gradients must look like.
  std::vector<std::pair<DType, Shape>> output_kinds;
  BackwardFn backward;
  Tensor leaf;
  bool freed = false;

  ~Node();
};

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

// Where gradients come from that backward is started with.
constexpr std::uint64_t kRoot = ~std::uint64_t{0};

// Later nodes first. The numbers only order nodes of one graph, so that one
// counter may serve every rank of the process.
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

Edge edge_to(const Tensor& tensor) {
  if (!tensor.requires_grad()) return {};
  Meta& meta = *tensor.impl()->meta;
  if (meta.grad_fn != nullptr) return {meta.grad_fn, meta.output_index};
  return {accumulator_of(tensor), 0};
}

// a + b, into a's array when `in_place`.
Tensor sum_of(const Tensor& a, const Tensor& b, bool in_place) {
  SB_CHECK(a.shape() == b.shape(), "backward: gradients of shapes ",
           shape_text(a.shape()), " and ", shape_text(b.shape()),
           " meet at one tensor");
  Tensor result = in_place ? a : a.empty_like();
  internal::OpScope scope("add", static_cast<double>(a.numel()),
                          internal::bytes_of({&a, &b, &result}), a);
  if (!scope.runs()) return result;
  // Gradients of a convolution's weight may add up in the kernel's order
  const bool as_they_lie = in_place && internal::share_kernel_order(a, b);
  const auto address = [as_they_lie](const Tensor& tensor) {
    return as_they_lie ? internal::address_as_it_lies(tensor) : tensor.raw();
  };
  kernels::binary(scope.kernels(), kernels::BinaryOp::kAdd, a.dtype(),
                  a.numel(), address(a), address(b), address(result));
  return result;
}

void check_gradient(const char* name, const Tensor& grad, const Edge& edge) {
  const auto& [dtype, shape] = edge.node->output_kinds[edge.output_index];
  SB_CHECK(grad.dtype() == dtype && grad.shape() == shape, "backward of '",
           name, "': a gradient ", dtype_name(grad.dtype()),
           shape_text(grad.shape()), " for an input ", dtype_name(dtype),
           shape_text(shape));
}

// Adds `grad` to what the leaf has, in place, so that views stay views. The
// sum may be wider than the parameter.
void accumulate(const Tensor& leaf, Tensor grad) {
  Meta& meta = leaf.impl()->grad_meta();
  if (meta.grad.defined()) {
    if (meta.grad.dtype() != grad.dtype()) {
      Tensor wide = meta.grad.empty_like();
      wide.copy_from(grad);
      grad = wide;
    }
    sum_of(meta.grad, grad, /*in_place=*/true);
  } else if (meta.grad_buffer.defined()) {
    meta.grad_buffer.copy_from(grad);
    meta.grad = meta.grad_buffer;
  } else {
    MemoryScope kind(meta.grad_kind);
    meta.grad = internal::is_sole_owner(grad) ? std::move(grad) : grad.clone();
    meta.grad.set_memory_kind(meta.grad_kind);
  }
  // A hook may add or remove hooks.
  const auto hooks = meta.accumulate_hooks;
  Tensor parameter = leaf;
  for (const auto& [key, hook] : hooks) hook(parameter);
}

}  // namespace

/// One call of `backward`: who waits for how many gradients, who is ready.
class GraphTask {
 public:
  GraphTask(bool retain_graph, GraphTask* outer)
      : retain_graph_(retain_graph), outer_(outer) {}

  /// Drops its handles to outputs and gradients as soon as the graph has them.
  void run(Tensors outputs, Tensors grad_outputs);
  void add_callback(std::function<void()> callback) {
    if (outer_ != nullptr) {
      outer_->add_callback(std::move(callback));
      return;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    callbacks_.push_back(std::move(callback));
  }

 private:
  /// A gradient that came from an input of the operation `from`.
  struct Arrival {
    std::uint64_t from;
    std::size_t input;
    std::size_t output_index;
    Tensor grad;
  };
  struct Inputs {
    Tensors grads;
    int missing = 0;
    // Among several devices: what has come and is not yet added, and all that
    // will come, by node and input, in the order in which it is added.
    std::vector<Arrival> arrivals;
    std::vector<std::pair<std::uint64_t, std::size_t>> expected;
    std::size_t num_added = 0;
    bool all_from_here = true;  ///< from nodes of the same device
  };
  struct Later {
    bool operator()(const std::shared_ptr<Node>& a,
                    const std::shared_ptr<Node>& b) const {
      return a->sequence < b->sequence;
    }
  };
  using ReadyQueue =
      std::priority_queue<std::shared_ptr<Node>,
                          std::vector<std::shared_ptr<Node>>, Later>;

  void discover(const std::vector<std::shared_ptr<Node>>& roots);
  void deliver(const Edge& edge, const Tensor& grad, std::uint64_t from,
               std::size_t input);
  static void add_to(Tensor& slot, const Tensor& grad);
  void add_what_came(Node& node);
  Tensors take_gradients(Node& node);
  void arrive(const Edge& edge);
  void execute(const std::shared_ptr<Node>& node);
  void work(const Device& device);
  std::size_t queue_of(const Device& device) const {
    return static_cast<std::size_t>(
        std::find(devices_.begin(), devices_.end(), device) - devices_.begin());
  }

  const bool retain_graph_;
  GraphTask* const outer_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::unordered_map<Node*, Inputs> inputs_;
  std::vector<Device> devices_;
  std::vector<ReadyQueue> ready_;  // one per device
  std::int64_t unfinished_ = 0;
  std::exception_ptr error_;
  std::vector<std::function<void()>> callbacks_;
};

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
      inputs.expected.emplace_back(node->sequence, i);
      inputs.all_from_here &= node->device == next->device;
    }
  }
  if (devices_.size() > 1) {
    for (auto& [node, inputs] : inputs_) {
      // The order in which one device would make them: later nodes first.
      std::sort(inputs.expected.begin(), inputs.expected.end(),
                [](const auto& a, const auto& b) {
                  return a.first != b.first ? a.first > b.first
                                            : a.second < b.second;
                });
    }
  }
  ready_.resize(devices_.size());
  unfinished_ = static_cast<std::int64_t>(seen.size());
}

// Adds one gradient to what a node's output has received so far. Devices run
// at their own pace: among several, a gradient waits for those that one device
// would have made before it, so that the sum does not depend on who came first.
void GraphTask::deliver(const Edge& edge, const Tensor& grad,
                        std::uint64_t from, std::size_t input) {
  Inputs& inputs = inputs_[edge.node.get()];
  if (devices_.size() > 1 && from != kRoot) {
    inputs.arrivals.push_back({from, input, edge.output_index, grad});
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

// Adds what has come, as far as it is next in order: a weight that is used many
// times need not keep all of its gradients. Only the thread of the node's
// device adds.
void GraphTask::add_what_came(Node& node) {
  Inputs& inputs = inputs_.at(&node);
  for (;;) {
    Arrival next;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (inputs.num_added == inputs.expected.size()) return;
      const auto& [from, input] = inputs.expected[inputs.num_added];
      const auto found =
          std::find_if(inputs.arrivals.begin(), inputs.arrivals.end(),
                       [from = from, input = input](const Arrival& arrival) {
                         return arrival.from == from && arrival.input == input;
                       });
      if (found == inputs.arrivals.end()) return;
      next = std::move(*found);
      inputs.arrivals.erase(found);
      ++inputs.num_added;
    }
    if (next.grad.defined()) {
      add_to(inputs.grads[next.output_index], next.grad);
    }
  }
}

Tensors GraphTask::take_gradients(Node& node) {
  if (devices_.size() > 1) add_what_came(node);
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::move(inputs_[&node].grads);
}

// One of the gradients a node waits for has come (or is known to be zero).
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
      accumulate(node->leaf, std::move(grad));
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
  // What comes from elsewhere comes at any time: it waits, so that the same
  // operations run at the same point every time.
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

bool needs_grad(const Tensors& inputs) {
  if (!RankContext::current().grad_enabled) return false;
  return std::any_of(inputs.begin(), inputs.end(), [](const Tensor& tensor) {
    return tensor.requires_grad();
  });
}

namespace {

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

}  // namespace

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

void at_end_of_backward(std::function<void()> callback) {
  GraphTask* task = RankContext::current().graph_task;
  SB_CHECK(task != nullptr, "at_end_of_backward: no backward is running");
  task->add_callback(std::move(callback));
}

Tensor graph_input(const Tensor& x) {
  Tensor leaf = x.detach();
  leaf.set_requires_grad();
  leaf.impl()->meta->grad_kind = MemoryKind::kActivation;
  return leaf;
}

void accumulate_gradient(const Tensor& leaf, Tensor grad) {
  accumulate(leaf, std::move(grad));
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
    auto* x = input.data<double>();
    for (std::int64_t i = 0; i < input.numel(); ++i) {
      const double saved = x[i];
      x[i] = saved + epsilon;
      const double above = function(inputs).item();
      x[i] = saved - epsilon;
      const double below = function(inputs).item();
      x[i] = saved;
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
