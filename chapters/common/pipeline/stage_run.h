#pragma once

// A micro-batch inside a stage, from forward to backward.
//
//   StageRun run = run_forward(stage, inputs, spec);
//   ...                                  // run.outputs are sent, and let go
//   Tensors grads = run_backward(std::move(run), grad_outputs);

#include <functional>
#include <memory>
#include <vector>

#include "chapters/common/pipeline/stages.h"
#include "core/context.h"

namespace shardbook {

/// What a stage computes for one micro-batch.
using StageFunction = std::function<Tensors(const Tensors&)>;

/// A micro-batch's graph in a stage, from forward to backward.
struct StageRun {
  Tensors inputs;  ///< leaves; those that need a gradient require one
  /// For the next stage. Backward needs them no longer: let them go when they
  /// have been sent.
  Tensors outputs;
  /// Stands for the outputs at the end of the graph, with no elements;
  /// undefined where nothing needs a gradient.
  Tensor end;
  /// Gradients of the outputs that need one, when backward begins.
  std::shared_ptr<Tensors> grad_outputs;
  std::vector<bool> needs_grad;  ///< by output
};

/// `received` become the leaves of a new graph: first what `spec` lists, then
/// skips (which need gradients).
StageRun run_forward(const StageFunction& stage, const Tensors& received,
                     const LayerInput& spec);
StageRun run_forward(Module& stage, const Tensors& received,
                     const LayerInput& spec);
/// The same once more, for a micro-batch whose first run kept no graph:
/// `random` is what the first run began with.
StageRun run_forward_again(const StageFunction& stage, const Tensors& received,
                           const LayerInput& spec, const RandomState& random);
/// Gradients of the inputs (undefined where they need none); those of the
/// parameters are accumulated. Frees the graph, and each of `grad_outputs` when
/// it has been used: one per output, undefined where none came.
Tensors run_backward(StageRun run, Tensors grad_outputs);

}  // namespace shardbook
