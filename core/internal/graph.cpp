#include "core/internal/graph.h"

#include <atomic>

#include "core/internal/tensor_impl.h"

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

}  // namespace shardbook::autograd
