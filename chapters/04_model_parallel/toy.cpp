#include "chapters/04_model_parallel/toy.h"

#include <string>

namespace shardbook::model_parallel {
namespace {

class ToyLayer : public ModuleOf<ToyLayer> {
 public:
  ToyLayer(std::string name, std::int64_t out, bool with_relu,
           const InitOptions& init)
      : name_(std::move(name)),
        with_relu_(with_relu),
        linear_(name_, 10, out, init) {}
  Tensor forward(const Tensor& x) override {
    const Tensor y = linear_(x);
    return with_relu_ ? relu(y) : y;
  }
  void members(MemberVisitor& visit) override { visit.module(name_, linear_); }
  std::string type_name() const override { return "ToyLayer"; }

 private:
  std::string name_;
  bool with_relu_;
  Linear linear_;
};

class ToyLayers : public LayerList {
 public:
  int size() const override { return 2; }
  std::string name(int layer) const override {
    return layer == 0 ? "net1" : "net2";
  }
  std::unique_ptr<Module> make(int layer,
                               const InitOptions& init) const override {
    if (layer == 0) return std::make_unique<ToyLayer>("net1", 10, true, init);
    return std::make_unique<ToyLayer>("net2", 5, false, init);
  }
};

}  // namespace

std::unique_ptr<LayerList> toy_layers() {
  return std::make_unique<ToyLayers>();
}

}  // namespace shardbook::model_parallel
