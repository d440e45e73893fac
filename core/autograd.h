#pragma once

// Reverse-mode differentiation: a tape that is written as operations run.
//
// Every operation that may need a gradient appends one `Node` with what its
// backward needs. `backward` walks the nodes in reverse order of creation, sums
// gradients where paths meet, accumulates them in the leaves and calls the
// leaves' hooks as each becomes final:
//
//   Tensor square(const Tensor& x) {
//     Tensor y = ...;                              // computed from x
//     autograd::record("square", {x}, {y}, [x](const Tensors& grads) {
//       return Tensors{mul(scale(x, 2), grads[0])};
//     });
//     return y;
//   }
//
// The order of nodes depends on the program alone, so every run gives the same
// bits. A graph whose nodes lie on several devices runs with one thread per
// device. Saved tensors are dropped as soon as a node has run.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/tensor.h"

namespace shardbook::autograd {

/// Gradients of the outputs to gradients of the inputs; an undefined tensor
/// stands for zero, on both sides.
using BackwardFn = std::function<Tensors(const Tensors& grad_outputs)>;

/// True where gradients are recorded and one of the tensors needs one.
bool needs_grad(const Tensors& inputs);

/// Appends a node that leads from `outputs` to `inputs`, when needs_grad.
/// `outputs` must be fresh. Saved outputs must be captured detached.
void record(const char* name, const Tensors& inputs, const Tensors& outputs,
            BackwardFn backward);

/// A function with its own backward: `forward` runs unrecorded; its results are
/// linked to `inputs` by one node. `backward` captures what it needs.
Tensors custom_function(const char* name, const Tensors& inputs,
                        const std::function<Tensors(const Tensors&)>& forward,
                        BackwardFn backward);

/// Accumulates d(outputs)/d(leaf) into every leaf's gradient. `grad_outputs`
/// are the gradients to start from; none needed for scalars. The graph is
/// freed on the way unless `retain_graph`; a second backward then throws.
void backward(const Tensors& outputs, const Tensors& grad_outputs = {},
              bool retain_graph = false);

/// Calls `ended` at the end of the backward that is running on this thread, or
/// `failed` (which must not throw) when an exception ends it, even one of
/// `ended`.
void at_end_of_backward(std::function<void()> ended,
                        std::function<void()> failed = nullptr);

/// A leaf with x's array, at which a separate graph begins: the input of a
/// stage or of a recomputed block. Its gradient is booked as an activation.
Tensor graph_input(const Tensor& x);

/// Adds `grad` to the gradient of a leaf and runs its hooks, as backward does
/// when it reaches the leaf.
void accumulate_gradient(const Tensor& leaf, Tensor grad);

/// The leaves that need a gradient and are reachable from the outputs, each
/// once.
Tensors reachable_leaves(const Tensors& outputs);

/// Drops the activations of `function` and computes them again in backward,
/// with the random state of the first run. Gradients also reach the parameters
/// that `function` uses, even when no input needs a gradient.
/// Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".
Tensors recompute(const std::function<Tensors(const Tensors&)>& function,
                  const Tensors& inputs);

/// Compares gradients with central differences in f64; returns the largest
/// relative error over all inputs that require grad.
double check_gradients(const std::function<Tensor(const Tensors&)>& function,
                       const Tensors& inputs, double epsilon = 1e-6);

}  // namespace shardbook::autograd
