#include "chapters/05_gpipe/long_skips.h"

#include <string>
#include <utility>

#include "core/check.h"
#include "core/ops.h"

namespace shardbook::gpipe {
namespace {

/// A block that adds a popped tensor to its input, and stashes its output.
class Joined : public Module {
 public:
  Joined(std::unique_ptr<Module> block, bool stashes)
      : block_(std::move(block)), stashes_(stashes) {}
  Joined(const Joined& other)
      : Module(other),
        block_(other.block_->clone()),
        stashes_(other.stashes_) {}
  Tensors forward_all(const Tensors& inputs) override {
    const Tensor x = inputs.size() > 1 ? add(inputs[0], inputs[1]) : inputs[0];
    const Tensor y = (*block_)(x);
    return stashes_ ? Tensors{y, y} : Tensors{y};
  }
  void members(MemberVisitor& visit) override { block_->members(visit); }
  std::unique_ptr<Module> clone() const override {
    return std::make_unique<Joined>(*this);
  }
  std::string type_name() const override { return block_->type_name(); }

 private:
  std::unique_ptr<Module> block_;
  bool stashes_;
};

class LongSkips : public LayerList {
 public:
  explicit LongSkips(std::shared_ptr<const LayerList> layers)
      : layers_(std::move(layers)) {}
  int size() const override { return layers_->size(); }
  std::string name(int layer) const override { return layers_->name(layer); }
  std::unique_ptr<Module> make(int layer,
                               const InitOptions& init) const override {
    auto block = layers_->make(layer, init);
    const Skips ends = skips(layer);
    if (ends.stash.empty() && ends.pop.empty()) return block;
    return std::make_unique<Joined>(std::move(block), !ends.stash.empty());
  }
  Skips skips(int layer) const override {
    Skips ends;
    const int partner = size() - 1 - layer;
    if (layer == 0 || partner == 0) return ends;
    if (partner - layer >= 2) ends.stash = {"long/" + std::to_string(layer)};
    if (layer - partner >= 2) ends.pop = {"long/" + std::to_string(partner)};
    return ends;
  }

 private:
  std::shared_ptr<const LayerList> layers_;
};

}  // namespace

std::unique_ptr<LayerList> with_long_skips(
    std::shared_ptr<const LayerList> layers, const ModelConfig& config) {
  SB_CHECK(config.type == "gpt2",
           "--long-skips: the layers of a model of type ", config.type,
           " change the shape of their input; give a GPT");
  return std::make_unique<LongSkips>(std::move(layers));
}

}  // namespace shardbook::gpipe
