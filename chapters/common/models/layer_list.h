#pragma once

// A model as a list of layers, made one at a time.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "chapters/common/models/models.h"
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
  /// The list to run on shapes alone, in which communicating layers have twins
  /// whose messages reach nobody.
  virtual const LayerList& on_shapes() const { return *this; }
};

/// One module under its name in the whole model.
template <typename M>
class Named : public ModuleOf<Named<M>> {
 public:
  Named(std::string name, M module)
      : name_(std::move(name)), module_(std::move(module)) {}
  Tensor forward(const Tensor& x) override { return module_(x); }
  void members(MemberVisitor& visit) override { visit.module(name_, module_); }
  std::string type_name() const override { return module_.type_name(); }

 private:
  std::string name_;
  M module_;
};

/// GPT: embedding, blocks, head. MLP: embedding, three linear layers. ResNet:
/// stem, blocks, head.
std::unique_ptr<LayerList> layers_of(const ModelConfig& config);
/// A GPT's layers from a factory. `on_shapes` makes the same layers for runs on
/// shapes (see LayerList::on_shapes).
std::unique_ptr<LayerList> layers_of(const ModelConfig& config,
                                     const LayerFactory& layers,
                                     const LayerFactory& on_shapes);

}  // namespace shardbook
