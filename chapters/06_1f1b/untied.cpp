#include "chapters/06_1f1b/untied.h"

#include <string>
#include <utility>

#include "core/check.h"

namespace shardbook::pipeline {
namespace {

/// Visits the members of a head, and renames the token embedding.
class Renaming : public MemberVisitor {
 public:
  Renaming(const std::string& tied, MemberVisitor& visit)
      : tied_(tied), visit_(visit) {}
  void parameter(const std::string& name, Tensor& tensor) override {
    visit_.parameter(name, tensor);
  }
  void buffer(const std::string& name, Tensor& tensor) override {
    visit_.buffer(name, tensor);
  }
  void module(const std::string& name, Module& child) override {
    visit_.module(name == tied_ ? "lm_head" : name, child);
  }

 private:
  const std::string& tied_;
  MemberVisitor& visit_;
};

class UntiedHead : public Module {
 public:
  UntiedHead(std::string tied, std::unique_ptr<Module> head)
      : tied_(std::move(tied)), head_(std::move(head)) {}
  UntiedHead(const UntiedHead& other)
      : Module(other), tied_(other.tied_), head_(other.head_->clone()) {}
  Tensors forward_all(const Tensors& inputs) override {
    return (*head_)(inputs);
  }
  void members(MemberVisitor& visit) override {
    Renaming renaming(tied_, visit);
    head_->members(renaming);
  }
  std::unique_ptr<Module> clone() const override {
    return std::make_unique<UntiedHead>(*this);
  }
  std::string type_name() const override { return head_->type_name(); }

 private:
  std::string tied_;
  std::unique_ptr<Module> head_;
};

class UntiedLayers : public LayerList {
 public:
  /// `tied`: the module's name, as the first layer's.
  UntiedLayers(std::string tied, std::shared_ptr<const LayerList> layers)
      : tied_(std::move(tied)), layers_(std::move(layers)) {}
  int size() const override { return layers_->size(); }
  std::string name(int layer) const override { return layers_->name(layer); }
  std::unique_ptr<Module> make(int layer,
                               const InitOptions& init) const override {
    std::unique_ptr<Module> made = layers_->make(layer, init);
    if (layer + 1 < size()) return made;
    return std::make_unique<UntiedHead>(tied_, std::move(made));
  }

 private:
  std::string tied_;
  std::shared_ptr<const LayerList> layers_;
};

}  // namespace

std::shared_ptr<const LayerList> untied(
    std::shared_ptr<const LayerList> layers) {
  const auto tied = shared_parameters(*layers);
  if (tied.empty()) return layers;
  const std::string& weight = tied.begin()->first;
  auto result = std::make_shared<UntiedLayers>(
      weight.substr(0, weight.rfind('.')), std::move(layers));
  const auto shared = shared_parameters(*result);
  SB_CHECK(shared.empty(), "untied: layers still share '",
           shared.begin()->first,
           "'; only a head's token embedding can be untied");
  return result;
}

}  // namespace shardbook::pipeline
