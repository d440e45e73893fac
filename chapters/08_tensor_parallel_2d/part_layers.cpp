#include "chapters/08_tensor_parallel_2d/part_layers.h"

#include <memory>
#include <utility>
#include <vector>

#include "core/check.h"

namespace shardbook::summa {
namespace {

/// A module that computes `function` of its input and of its parameters.
class PartLayer : public ModuleOf<PartLayer> {
 public:
  using Function =
      std::function<Tensor(const Tensor& x, const PartLayer& layer)>;

  PartLayer(std::string type, std::vector<NamedTensor> parts, Function function)
      : type_(std::move(type)),
        parts_(std::move(parts)),
        function_(std::move(function)) {}
  Tensor forward(const Tensor& x) override { return function_(x, *this); }
  void members(MemberVisitor& visit) override {
    for (NamedTensor& part : parts_) visit.parameter(part.name, part.tensor);
  }
  std::string type_name() const override { return type_; }
  const Tensor& weight() const { return parts_.at(0).tensor; }
  const Tensor& bias() const { return parts_.at(1).tensor; }

 private:
  std::string type_;
  std::vector<NamedTensor> parts_;
  Function function_;
};

}  // namespace

LayerFactory factory_of(const PartLayers& parts) {
  const auto part_of = [layout = parts.layout](const std::string& name,
                                               InitOptions init) {
    init.shards = layout(name);
    return init;
  };
  const auto table = [=](const std::string& name, const Shape& shape,
                         double stddev, const InitOptions& init) {
    const std::string weight = name + ".weight";
    return NamedTensor{
        "weight", make_parameter(weight, shape, stddev, part_of(weight, init))};
  };
  const auto vector = [=](const std::string& layer, const std::string& name,
                          std::int64_t size, double value,
                          const InitOptions& init) {
    return NamedTensor{
        name, make_constant_parameter({size}, value,
                                      part_of(layer + "." + name, init))};
  };
  const auto layer = [](const char* type, std::vector<NamedTensor> own,
                        PartLayer::Function function) -> AnyModule {
    return {
        std::make_unique<PartLayer>(type, std::move(own), std::move(function))};
  };

  LayerFactory made;
  made.linear = [=, f = parts.linear](const std::string& name,
                                      const BlockPart& part,
                                      const InitOptions& init) {
    return layer("Linear",
                 {table(name, {part.in, part.out}, part.stddev, init),
                  vector(name, "bias", part.out, 0, init)},
                 [=](const Tensor& x, const PartLayer& own) {
                   return f(name, x, own.weight(), own.bias());
                 });
  };
  made.norm = [=, f = parts.layer_norm](const std::string& name,
                                        const BlockPart& part, double eps,
                                        const InitOptions& init) {
    return layer("LayerNorm",
                 {vector(name, "weight", part.out, 1, init),
                  vector(name, "bias", part.out, 0, init)},
                 [=](const Tensor& x, const PartLayer& own) {
                   return f(name, x, own.weight(), own.bias(), eps);
                 });
  };
  made.embedding = [=, f = parts.embedding](const std::string& name,
                                            std::int64_t rows,
                                            std::int64_t width, double stddev,
                                            const InitOptions& init) {
    return layer("Embedding", {table(name, {rows, width}, stddev, init)},
                 [f](const Tensor& ids, const PartLayer& own) {
                   return f(own.weight(), ids);
                 });
  };
  made.position_embedding = made.embedding;
  made.positions = [f = parts.positions](AnyModule& wpe, const Tensor& tokens) {
    const Tensor& weight = wpe.as<PartLayer>().weight();
    const std::int64_t s = tokens.size(-1);
    SB_CHECK(s <= weight.size(0), "gpt: ", s, " tokens, the model has ",
             weight.size(0), " positions");
    return f(slice(weight, 0, 0, s));
  };
  made.dropout = [=, f = parts.dropout](double p) {
    return layer("Dropout", {}, [=](const Tensor& x, const PartLayer& own) {
      return own.is_training() ? f(x, p) : x;
    });
  };
  made.logits = [f = parts.logits](const Tensor& x, AnyModule& wte) {
    return f(x, wte.as<PartLayer>().weight());
  };
  return made;
}

std::int64_t blocks_of(const std::string& name) {
  return name.find(".c_attn") != std::string::npos ? 3 : 1;
}

}  // namespace shardbook::summa
