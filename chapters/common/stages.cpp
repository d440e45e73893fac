#include "chapters/common/stages.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/check.h"
#include "core/context.h"

namespace shardbook {
namespace {

// --- GPT ---------------------------------------------------------------------

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

class GptLayers : public LayerList {
 public:
  explicit GptLayers(const ModelConfig& config) : config_(config) {}
  int size() const override { return static_cast<int>(config_.n_layer) + 2; }
  std::string name(int layer) const override {
    if (layer == 0) return "transformer.wte";
    if (layer == size() - 1) return "transformer.ln_f";
    return "transformer.h." + std::to_string(layer - 1);
  }
  std::unique_ptr<Module> make(int layer,
                               const InitOptions& init) const override {
    if (layer == 0) return std::make_unique<GptEmbedding>(config_, init);
    if (layer == size() - 1) return std::make_unique<GptHead>(config_, init);
    return std::make_unique<Named<GptBlock>>(
        name(layer), GptBlock(name(layer), config_, init));
  }

 private:
  ModelConfig config_;
};

// --- MLP ---------------------------------------------------------------------

/// A linear layer, with ReLU behind it.
class LinearRelu : public ModuleOf<LinearRelu> {
 public:
  LinearRelu(std::string name, Linear linear)
      : name_(std::move(name)), linear_(std::move(linear)) {}
  Tensor forward(const Tensor& x) override { return relu(linear_(x)); }
  void members(MemberVisitor& visit) override { visit.module(name_, linear_); }
  std::string type_name() const override { return "LinearRelu"; }

 private:
  std::string name_;
  Linear linear_;
};

class MlpLayers : public LayerList {
 public:
  explicit MlpLayers(const ModelConfig& config) : config_(config) {}
  int size() const override { return 4; }
  std::string name(int layer) const override {
    return layer == 0 ? "wte" : "fc" + std::to_string(layer);
  }
  std::unique_ptr<Module> make(int layer,
                               const InitOptions& init) const override {
    // The model is small: each layer is taken out of a whole one
    MlpModel model(config_, init);
    switch (layer) {
      case 0:
        return std::make_unique<Named<Embedding>>("wte", model.wte);
      case 1:
        return std::make_unique<LinearRelu>("fc1", model.fc1);
      case 2:
        return std::make_unique<LinearRelu>("fc2", model.fc2);
      default:
        return std::make_unique<Named<Linear>>("fc3", model.fc3);
    }
  }

 private:
  ModelConfig config_;
};

// Parameters and buffers of one layer, without memory.
std::vector<NamedTensor> parameters_on_meta(const LayerList& layers,
                                            int layer) {
  InitOptions init;
  init.device = Device::meta();
  return layers.make(layer, init)->named_parameters();
}

}  // namespace

std::unique_ptr<LayerList> layers_of(const ModelConfig& config) {
  if (config.type == "mlp") return std::make_unique<MlpLayers>(config);
  return std::make_unique<GptLayers>(config);
}

// --- Stage -------------------------------------------------------------------

Stage::Stage(const LayerList& layers, int begin, int end,
             const InitOptions& init) {
  std::map<std::string, Tensor> seen;
  for (int i = begin; i < end; ++i) {
    layers_.push_back(layers.make(i, init));
    // A parameter of two layers of this stage is one tensor
    layers_.back()->replace_tensors(
        [&](const std::string& name, const Tensor& tensor) {
          return seen.emplace(name, tensor).first->second;
        });
  }
}

Stage::Stage(const Stage& other) : Module(other) {
  for (const auto& layer : other.layers_) layers_.push_back(layer->clone());
}

Tensors Stage::forward_all(const Tensors& inputs) {
  Tensors values = inputs;
  for (const auto& layer : layers_) values = (*layer)(values);
  return values;
}

void Stage::members(MemberVisitor& visit) {
  for (const auto& layer : layers_) layer->members(visit);
}

// --- Cuts --------------------------------------------------------------------

std::vector<int> cut_uniform(int num_layers, int num_stages) {
  SB_CHECK(num_stages >= 1 && num_stages <= num_layers, num_stages,
           " stages: the model has ", num_layers,
           " layers; give at most one stage per layer");
  std::vector<int> cuts = {0};
  for (int s = 0; s < num_stages; ++s) {
    const int extra = s < num_layers % num_stages ? 1 : 0;
    cuts.push_back(cuts.back() + num_layers / num_stages + extra);
  }
  return cuts;
}

std::vector<int> cut_by_balance(int num_layers,
                                const std::vector<int>& balance) {
  std::vector<int> cuts = {0};
  for (const int count : balance) {
    SB_CHECK(count >= 1, "balance: ", count,
             " layers in a stage; give at least one");
    cuts.push_back(cuts.back() + count);
  }
  SB_CHECK(cuts.back() == num_layers, "balance: adds up to ", cuts.back(),
           " layers, the model has ", num_layers);
  return cuts;
}

std::vector<int> cut_by_cost(const std::vector<double>& costs,
                             int num_stages) {
  const int n = static_cast<int>(costs.size());
  SB_CHECK(num_stages >= 1 && num_stages <= n, num_stages,
           " stages: the model has ", n,
           " layers; give at most one stage per layer");
  std::vector<double> before(costs.size() + 1, 0);
  std::partial_sum(costs.begin(), costs.end(), before.begin() + 1);
  auto at = [](auto& table, int i, int j) -> auto& {
    return table[static_cast<std::size_t>(i)][static_cast<std::size_t>(j)];
  };
  // worst[s][i]: the costliest stage when layers 0 .. i-1 make s stages
  const auto width = static_cast<std::size_t>(n) + 1;
  std::vector<std::vector<double>> worst(
      static_cast<std::size_t>(num_stages) + 1,
      std::vector<double>(width, 1e300));
  std::vector<std::vector<int>> last(worst.size(), std::vector<int>(width, 0));
  worst[0][0] = 0;
  for (int s = 1; s <= num_stages; ++s) {
    for (int i = s; i <= n; ++i) {
      for (int cut = s - 1; cut < i; ++cut) {
        const double here = before[static_cast<std::size_t>(i)] -
                            before[static_cast<std::size_t>(cut)];
        const double cost = std::max(at(worst, s - 1, cut), here);
        if (cost < at(worst, s, i)) {
          at(worst, s, i) = cost;
          at(last, s, i) = cut;
        }
      }
    }
  }
  std::vector<int> cuts = {n};
  for (int s = num_stages; s >= 1; --s) {
    cuts.push_back(at(last, s, cuts.back()));
  }
  std::reverse(cuts.begin(), cuts.end());
  return cuts;
}

std::vector<double> layer_parameters(const LayerList& layers) {
  std::vector<double> counts;
  for (int i = 0; i < layers.size(); ++i) {
    double count = 0;
    for (const NamedTensor& each : parameters_on_meta(layers, i)) {
      count += static_cast<double>(each.tensor.numel());
    }
    counts.push_back(count);
  }
  return counts;
}

// --- Shapes ------------------------------------------------------------------

std::vector<LayerInput> trace_shapes(const LayerList& layers,
                                     const Tensors& inputs, DType dtype) {
  // A context of its own: nobody's clock or ledger sees this
  RankContext context(Device::meta());
  const RankContext::Scope scope(context);
  InitOptions init;
  init.dtype = dtype;
  Tensors values;
  for (const Tensor& input : inputs) {
    values.push_back(Tensor::empty(input.shape(), {input.dtype(), Device()}));
  }
  std::vector<LayerInput> result;
  const auto note = [&] {
    LayerInput input;
    for (const Tensor& value : values) {
      input.values.push_back(
          {value.shape(), value.dtype(), value.requires_grad()});
    }
    input.first_random_op = context.random.next_op;
    result.push_back(std::move(input));
  };
  for (int i = 0; i < layers.size(); ++i) {
    note();
    values = (*layers.make(i, init))(values);
  }
  note();
  return result;
}

std::map<std::string, std::vector<int>> shared_parameters(
    const LayerList& layers) {
  std::map<std::string, std::vector<int>> places;
  for (int i = 0; i < layers.size(); ++i) {
    for (const NamedTensor& each : parameters_on_meta(layers, i)) {
      places[each.name].push_back(i);
    }
  }
  for (auto it = places.begin(); it != places.end();) {
    it = it->second.size() < 2 ? places.erase(it) : std::next(it);
  }
  return places;
}

}  // namespace shardbook
