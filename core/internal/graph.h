#pragma once

// The graph that operations record for backward. Read by core/*.cpp only.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "core/autograd.h"
#include "core/tensor.h"

namespace shardbook::autograd {

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
  /// The shape, dtype and device of the outputs' gradients.
  std::vector<std::pair<DType, Shape>> output_kinds;
  BackwardFn backward;
  Tensor leaf;
  bool freed = false;

  ~Node();
};

/// Where the gradient of `tensor` goes: to the node that made it, or to the one
/// that accumulates in a leaf.
Edge edge_to(const Tensor& tensor);

/// Appends a node that leads from `outputs` to `inputs`.
void attach(const char* name, const Tensors& inputs, const Tensors& outputs,
            BackwardFn backward);

}  // namespace shardbook::autograd
