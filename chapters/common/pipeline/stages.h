#pragma once

// A model as a list of layers, which pipelines cut into stages.
//
//   const auto layers = layers_of(config);           // embedding, blocks, head
//   const std::vector<int> cuts = cut_uniform(layers->size(), 4);
//   Stage stage(*layers, cuts[s], cuts[s + 1], init);  // this rank's layers
//
// A layer's members keep their names in the whole model, and each weight is
// drawn from the random stream of its name. So a stage that is built alone
// starts with the same weights as inside the model, and is saved and compared
// by the same names. Two layers may use the same parameter (the token embedding
// is also the head's weight). If these layers are on two ranks, the parameter
// is tied: both ranks start with the same values, and its gradients are summed.
//
// A skip connection passes over layers: one layer stashes a tensor under a
// name, and a later layer pops it. A tensor that a later stage pops is a
// further output of its stage; a tensor that an earlier stage stashed is a
// further input.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "chapters/common/models/layer_list.h"
#include "chapters/common/models/models.h"
#include "core/context.h"
#include "core/layers.h"

namespace shardbook {

/// Layers begin .. end-1, one after another. Inputs are those of the first
/// layer, then `incoming()`; outputs are those of the last, then `outgoing()`.
class Stage : public Module {
 public:
  /// Reuses parameters in `existing` (may be null), and adds new ones to it.
  Stage(const LayerList& layers, int begin, int end, const InitOptions& init,
        std::map<std::string, Tensor>* existing = nullptr);
  Stage(const Stage& other);

  Tensors forward_all(const Tensors& inputs) override;
  Tensor forward(const Tensor& x) override { return forward_all({x})[0]; }
  void members(MemberVisitor& visit) override;
  std::unique_ptr<Module> clone() const override {
    return std::make_unique<Stage>(*this);
  }
  std::string type_name() const override { return "Stage"; }

  int size() const { return static_cast<int>(layers_.size()); }
  /// Names of skips from earlier stages, and to later ones, in alphabetical
  /// order.
  const std::vector<std::string>& incoming() const { return incoming_; }
  const std::vector<std::string>& outgoing() const { return outgoing_; }
  /// The i-th layer of this stage.
  Module& operator[](int i) { return *layers_[static_cast<std::size_t>(i)]; }

 private:
  std::vector<std::unique_ptr<Module>> layers_;
  std::vector<Skips> skips_;  // by layer
  std::vector<std::string> incoming_, outgoing_;
};

// --- What crosses the cuts --------------------------------------------------

/// An input tensor of a layer, as known before the run.
struct ValueSpec {
  Shape shape;
  DType dtype = DType::kF32;
  bool needs_grad = false;  ///< its gradient travels back
};

/// The inputs of a layer, known from a run on shapes, so that no rank has to
/// send shapes to another.
struct LayerInput {
  std::vector<ValueSpec> values;
  /// Stashed earlier and popped here or later; not among the values.
  std::map<std::string, ValueSpec> skips;
  /// Random operations of one forward pass before this layer.
  std::uint64_t first_random_op = 0;
};

/// Inputs of all layers, and at the end the outputs of the last. `inputs` (on
/// any device) are the model's. Costs one forward on shapes.
std::vector<LayerInput> trace_shapes(const LayerList& layers,
                                     const Tensors& inputs, DType dtype);

/// A skip connection between two stages.
struct SkipRoute {
  std::string name;
  int from_stage = 0, to_stage = 0;
};
/// The skips between stages, in the order in which the layers stash. Throws
/// Error for a name that is stashed or popped twice, popped before it is
/// stashed, or never popped.
std::vector<SkipRoute> skip_routes(const LayerList& layers,
                                   const std::vector<int>& cuts);

/// Names and shapes of a layer's parameters, without memory.
std::vector<NamedTensor> layer_parameters_on_shapes(const LayerList& layers,
                                                    int layer);
/// For each parameter that several layers use: these layers.
std::map<std::string, std::vector<int>> shared_parameters(
    const LayerList& layers);

// --- A micro-batch inside a stage, from forward to backward -----------------
//
//   StageRun run = run_forward(stage, inputs, spec);
//   ...                                  // send run.outputs and release them
//   Tensors grads = run_backward(std::move(run), grad_outputs);

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
