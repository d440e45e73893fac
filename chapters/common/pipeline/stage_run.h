#pragma once

// A micro-batch inside a stage, from forward to backward.
//
//   StageRun run = run_forward(stage, inputs, spec);
//   ...                                  // send run.outputs and release them
//   Tensors grads = run_backward(std::move(run), grad_outputs);

#include <functional>
#include <memory>
#include <vector>

#include "chapters/common/pipeline/stages.h"
#include "core/context.h"

namespace shardbook {

/// The computation of a stage for one micro-batch.
using StageFunction = std::function<Tensors(const Tensors&)>;

/// A micro-batch's graph in a stage, from forward to backward.
struct StageRun {
  Tensors inputs;  ///< leaves; those that need a gradient require one
  /// For the next stage. Backward does not need them: release them when they
  /// have been sent.
  Tensors outputs;
  /// The end of the graph: a tensor without elements in place of the outputs;
  /// undefined if no output needs a gradient.
  Tensor end;
  /// Filled when backward begins: gradients of the outputs that need one.
  std::shared_ptr<Tensors> grad_outputs;
  std::vector<bool> needs_grad;  ///< by output
};

/// `received` become the leaves of a new graph: first the values in `spec`,
/// then skips (which need gradients).
StageRun run_forward(const StageFunction& stage, const Tensors& received,
                     const LayerInput& spec);
StageRun run_forward(Module& stage, const Tensors& received,
                     const LayerInput& spec);
/// Recomputes a micro-batch whose first run kept no graph. `random` is the
/// random state at the begin of the first run.
StageRun run_forward_again(const StageFunction& stage, const Tensors& received,
                           const LayerInput& spec, const RandomState& random);
/// Returns the gradients of the inputs (undefined where they need none), and
/// accumulates those of the parameters. `grad_outputs`: one per output,
/// undefined where none arrived; each is freed after its use. Frees the graph.
Tensors run_backward(StageRun run, Tensors grad_outputs);

}  // namespace shardbook
