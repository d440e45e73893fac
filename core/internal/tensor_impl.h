#pragma once

// What a Tensor handle points to. Read by core/*.cpp only.

#include <memory>
#include <utility>
#include <vector>

#include "core/tensor.h"

namespace shardbook {

namespace autograd {

/// A tensor's part in autograd; created when first needed.
struct Meta {
  bool requires_grad = false;
  /// A result in a parameter's place; see set_stands_for_parameter.
  bool stands_for_parameter = false;
  Tensor grad;
  Tensor grad_buffer;
  /// What the gradient is booked as; inner leaves of recomputation hold
  /// gradients of activations.
  MemoryKind grad_kind = MemoryKind::kGradient;
  /// The node that made this tensor, and which of its outputs this is.
  std::shared_ptr<Node> grad_fn;
  std::size_t output_index = 0;
  /// Leaves: the node that accumulates, alive while a graph needs it.
  std::weak_ptr<Node> accumulator;
  std::vector<std::pair<int, AccumulateHook>> accumulate_hooks;
  int next_hook_key = 0;
};

}  // namespace autograd

struct Tensor::Impl {
  std::shared_ptr<Storage> storage;
  std::int64_t offset = 0;  // in elements
  Shape shape;
  std::int64_t numel = 0;
  DType dtype = DType::kF32;
  int mark = 0;  // See core/marks.h
  std::unique_ptr<autograd::Meta> meta;

  autograd::Meta& grad_meta() {
    if (meta == nullptr) meta = std::make_unique<autograd::Meta>();
    return *meta;
  }
};

namespace internal {

/// A view of `base`'s storage, `offset` elements after its first.
Tensor make_view(const Tensor& base, std::int64_t offset, const Shape& shape);

/// Gives `result` the mark of its operands. Throws Error where two differ.
void pass_mark(const char* op, const Tensor& result, const Tensor& a,
               const Tensor& b = Tensor());

/// True when no other handle or view can see this tensor's array.
bool is_sole_owner(const Tensor& tensor);

}  // namespace internal

}  // namespace shardbook
