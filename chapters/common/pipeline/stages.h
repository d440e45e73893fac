#pragma once

// A model in pieces: what pipelines cut.
//
//   const auto layers = layers_of(config);           // embedding, blocks, head
//   const std::vector<int> cuts = cut_uniform(layers->size(), 4);
//   Stage stage(*layers, cuts[s], cuts[s + 1], init);  // this rank's layers
//
// A layer keeps the names that its members have in the whole model, and its
// weights are drawn from the streams of these names: a stage that is built
// alone begins as it would inside the model, and is saved and compared as part
// of it. A parameter may stand in two layers (the token embedding is also the
// head's weight); where these lie on two ranks, it is tied: both begin with the
// same values, and their gradients are summed.
//
// A skip connection reaches over layers: one layer stashes a tensor under a
// name, a later one pops it. A stage hands on what is popped behind it, and
// takes what was stashed before it, as further outputs and inputs.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "chapters/common/models/models.h"
#include "core/context.h"
#include "core/layers.h"

namespace shardbook {

/// Skip connections of one layer, by name: "namespace/name". The layer takes
/// the popped tensors behind its other inputs, and returns those to be stashed
/// behind its other outputs, in these orders.
struct Skips {
  std::vector<std::string> stash, pop;
};

/// A model as a list of layers, made one at a time. Between layers travel one
/// or more tensors, of any dtype.
class LayerList {
 public:
  virtual ~LayerList() = default;
  virtual int size() const = 0;
  /// For messages: "transformer.h.3".
  virtual std::string name(int layer) const = 0;
  /// Members of the module have their full names in the model.
  virtual std::unique_ptr<Module> make(int layer,
                                       const InitOptions& init) const = 0;
  virtual Skips skips(int) const { return {}; }
};

/// GPT: embedding, blocks, head. MLP: embedding, three linear layers. ResNet:
/// stem, blocks, head.
std::unique_ptr<LayerList> layers_of(const ModelConfig& config);

/// Layers begin .. end-1, one after another. Inputs are those of the first
/// layer, then `incoming()`; outputs those of the last, then `outgoing()`.
class Stage : public Module {
 public:
  /// Parameters that stand in `existing` (or null) are taken from there; new
  /// ones are added.
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
  /// Names of skips that come from earlier stages, and go to later ones; in
  /// alphabetical order.
  const std::vector<std::string>& incoming() const { return incoming_; }
  const std::vector<std::string>& outgoing() const { return outgoing_; }
  /// The i-th layer of this stage.
  Module& operator[](int i) { return *layers_[static_cast<std::size_t>(i)]; }

 private:
  std::vector<std::unique_ptr<Module>> layers_;
  std::vector<Skips> skips_;  // by layer
  std::vector<std::string> incoming_, outgoing_;
};

// --- Where to cut: first layer of each stage, and the end -------------------

/// Stages of equally many layers, the first ones one more where it does not
/// come out even (DeepSpeed's "uniform"). Throws Error for fewer layers than
/// stages.
std::vector<int> cut_uniform(int num_layers, int num_stages);
/// So many layers per stage; they add up to the number of layers
/// (torchgpipe's `balance`).
std::vector<int> cut_by_balance(int num_layers,
                                const std::vector<int>& balance);
/// Consecutive layers whose costs sum to as little as possible in the stage
/// where they sum to most; no stage is empty. O(p n^2).
std::vector<int> cut_by_cost(const std::vector<double>& costs, int num_stages);
/// Elements of the parameters of each layer, tied ones counted in each.
std::vector<double> layer_parameters(const LayerList& layers);
/// Seconds of forward and backward of each layer, as `seconds_of` prices its
/// operations on shapes; `inputs` are what the model reads.
std::vector<double> layer_seconds(
    const LayerList& layers, const Tensors& inputs, DType dtype,
    const std::function<double(const OpEvent&)>& seconds_of);

// --- What crosses the cuts --------------------------------------------------

/// A tensor that a layer takes, as known before the run.
struct ValueSpec {
  Shape shape;
  DType dtype = DType::kF32;
  bool needs_grad = false;  ///< its gradient travels back
};

/// What layer i takes: known from a run on shapes, so that no rank has to send
/// shapes to another.
struct LayerInput {
  std::vector<ValueSpec> values;
  /// Stashed before, popped here or later; they do not travel with the values.
  std::map<std::string, ValueSpec> skips;
  /// Random operations of one forward pass before this layer.
  std::uint64_t first_random_op = 0;
};

/// Inputs of all layers, and behind them the outputs of the last; `inputs` (on
/// any device) are what the model reads. Costs one forward on shapes.
std::vector<LayerInput> trace_shapes(const LayerList& layers,
                                     const Tensors& inputs, DType dtype);

/// A skip connection whose ends lie on two stages.
struct SkipRoute {
  std::string name;
  int from_stage = 0, to_stage = 0;
};
/// In the order in which the layers stash. Throws Error for a name that is
/// stashed or popped twice, popped before it is stashed, or never popped.
std::vector<SkipRoute> skip_routes(const LayerList& layers,
                                   const std::vector<int>& cuts);

/// Names and shapes of a layer's parameters, without memory.
std::vector<NamedTensor> layer_parameters_on_shapes(const LayerList& layers,
                                                    int layer);
/// Layers in which a parameter stands, for the parameters that stand in
/// several.
std::map<std::string, std::vector<int>> shared_parameters(
    const LayerList& layers);

}  // namespace shardbook
