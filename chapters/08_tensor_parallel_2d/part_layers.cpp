#include "chapters/08_tensor_parallel_2d/part_layers.h"

#include <memory>
#include <utility>
#include <vector>

#include "chapters/common/sharded/parts.h"
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
  /// Undefined: without.
  Tensor bias() const {
    return parts_.size() > 1 ? parts_[1].tensor : Tensor();
  }

 private:
  std::string type_;
  std::vector<NamedTensor> parts_;
  Function function_;
};

}  // namespace

Parameters::Parameters(const ModelConfig& config) {
  const BlockTable block = block_table(config);
  const DecoderNames names = decoder_names(config);
  modules_ = {{names.table, {Parameter::kTable}},
              {names.output(), {Parameter::kTable}},
              {names.norm, {Parameter::kNorm, block.norm_1}}};
  if (!names.positions.empty()) {
    modules_.push_back({names.positions, {Parameter::kPositions}});
  }
  for (const BlockPart& part : block.head_norms) {
    modules_.push_back({"." + part.name, {Parameter::kHeadNorm, part}});
  }
  for (const BlockPart& part : block.parts()) {
    if (part.name.empty()) continue;
    modules_.push_back(
        {"." + part.name,
         {part.is_norm() ? Parameter::kNorm : Parameter::kWeight, part}});
  }
}

Parameter Parameters::of(const std::string& name) const {
  const std::string module = name.substr(0, name.rfind('.'));
  for (const auto& [end, parameter] : modules_) {
    if (!module.ends_with(end)) continue;
    if (parameter.kind == Parameter::kWeight && name.ends_with(".bias")) {
      return {Parameter::kBias, parameter.part};
    }
    return parameter;
  }
  SB_FAIL("tensor parallelism: no rule says how to cut ", name);
}

LayerFactory factory_of(const PartLayers& parts) {
  const auto part_of = [layout = parts.layout](const Parameter& parameter,
                                               InitOptions init) {
    init.shards = layout(parameter);
    return init;
  };
  const auto matrix = [=](const std::string& layer, const Parameter& parameter,
                          const Shape& shape, double stddev,
                          const InitOptions& init) {
    return NamedTensor{"weight",
                       make_parameter(layer + ".weight", shape, stddev,
                                      part_of(parameter, init))};
  };
  const auto vector = [=](const std::string& name, const Parameter& parameter,
                          double value, const InitOptions& init) {
    return NamedTensor{name,
                       make_constant_parameter({parameter.part.out}, value,
                                               part_of(parameter, init))};
  };
  const auto layer = [](const char* type, std::vector<NamedTensor> own,
                        PartLayer::Function function) -> AnyModule {
    return {
        std::make_unique<PartLayer>(type, std::move(own), std::move(function))};
  };
  const auto table = [=, f = parts.embedding](Parameter::Kind kind) {
    return [=](const std::string& name, std::int64_t rows, std::int64_t width,
               double stddev, const InitOptions& init) {
      return layer("Embedding",
                   {matrix(name, {kind}, {rows, width}, stddev, init)},
                   [f](const Tensor& ids, const PartLayer& own) {
                     return f(own.weight(), ids);
                   });
    };
  };

  LayerFactory made;
  made.linear = [=, f = parts.linear](const std::string& name,
                                      const BlockPart& part,
                                      const InitOptions& init) {
    std::vector<NamedTensor> own = {matrix(name, {Parameter::kWeight, part},
                                           {part.in, part.out}, part.stddev,
                                           init)};
    if (part.bias) {
      own.push_back(vector("bias", {Parameter::kBias, part}, 0, init));
    }
    return layer("Linear", std::move(own),
                 [=](const Tensor& x, const PartLayer& own) {
                   return f(name, part, x, own.weight(), own.bias());
                 });
  };
  made.norm = [=, f = parts.norm](const std::string& name,
                                  const BlockPart& part, double eps,
                                  const InitOptions& init) {
    const bool is_rms = part.kind == PartKind::kRmsNorm;
    const Parameter parameter = {Parameter::kNorm, part};
    std::vector<NamedTensor> own = {vector("weight", parameter, 1, init)};
    if (!is_rms) own.push_back(vector("bias", parameter, 0, init));
    return layer(is_rms ? "RmsNorm" : "LayerNorm", std::move(own),
                 [=](const Tensor& x, const PartLayer& own) {
                   return f(name, x, own.weight(), own.bias(), eps);
                 });
  };
  made.embedding = table(Parameter::kTable);
  made.position_embedding = table(Parameter::kPositions);
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

std::function<void(const std::vector<NamedTensor>& parameters)> sum_head_norms(
    const ModelConfig& config, ProcessGroup& world) {
  if (block_table(config).head_norms.empty()) return {};
  return [all = Parameters(config),
          &world](const std::vector<NamedTensor>& parameters) {
    Tensors norms;
    for (const NamedTensor& each : parameters) {
      if (all.of(each.name).kind == Parameter::kHeadNorm) {
        norms.push_back(each.tensor);
      }
    }
    sum_gradients(world, norms, "norms of heads");
  };
}

}  // namespace shardbook::summa
