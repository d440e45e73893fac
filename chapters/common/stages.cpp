#include "chapters/common/stages.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "chapters/common/resnet.h"
#include "core/autograd.h"
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
    const std::int64_t v = config_.vocab_size, h = config_.n_embd;
    switch (layer) {
      case 0:
        return std::make_unique<Named<Embedding>>(
            "wte", Embedding("wte", v, h, init, 1.0));
      case 1:
        return std::make_unique<LinearRelu>("fc1",
                                            Linear("fc1", h, 4 * h, init));
      case 2:
        return std::make_unique<LinearRelu>("fc2",
                                            Linear("fc2", 4 * h, h, init));
      default:
        return std::make_unique<Named<Linear>>("fc3",
                                               Linear("fc3", h, v, init));
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

// A layer whose parameters that are in `seen` are those: they never exist twice
// on the device.
std::unique_ptr<Module> make_layer(const LayerList& layers, int i,
                                   const InitOptions& init,
                                   std::map<std::string, Tensor>& seen) {
  const auto parameters = parameters_on_meta(layers, i);
  const bool is_shared = std::any_of(
      parameters.begin(), parameters.end(),
      [&](const NamedTensor& each) { return seen.count(each.name) != 0; });
  InitOptions where = init;
  const bool on_host = is_shared && !init.device.defined();
  if (on_host) where.device = RankContext::current().host();
  auto layer = layers.make(i, where);
  layer->replace_tensors([&](const std::string& name, const Tensor& tensor) {
    const auto found = seen.find(name);
    if (found != seen.end()) return found->second;
    Tensor here = tensor;
    if (on_host) {
      const MemoryScope kind(MemoryKind::kParameter);
      here = Tensor::empty(tensor.shape(), {tensor.dtype(), Device()});
      here.copy_from(tensor);
      if (tensor.requires_grad()) here.set_requires_grad();
    }
    return seen.emplace(name, here).first->second;
  });
  return layer;
}

using NamedValues = std::map<std::string, Tensor>;

// Forward on shapes, layer by layer; `before_layer` sees what each takes and
// what is stashed, and in the end what the last one returned. In a context of
// its own, so that nobody's clock or ledger sees it.
void walk_on_shapes(const LayerList& layers, const Tensors& inputs, DType dtype,
                    const std::function<void(const Tensors&, const NamedValues&)>&
                        before_layer) {
  RankContext context(Device::meta());
  const RankContext::Scope scope(context);
  InitOptions init;
  init.dtype = dtype;
  Tensors values;
  for (const Tensor& input : inputs) {
    values.push_back(Tensor::empty(input.shape(), {input.dtype(), Device()}));
  }
  NamedValues stashed;
  for (int i = 0; i < layers.size(); ++i) {
    before_layer(values, stashed);
    Stage layer(layers, i, i + 1, init);
    for (const std::string& name : layer.incoming()) {
      values.push_back(stashed.at(name));
      stashed.erase(name);
    }
    values = layer(values);
    for (std::size_t left = layer.outgoing().size(); left > 0; --left) {
      stashed[layer.outgoing()[left - 1]] = values.back();
      values.pop_back();
    }
  }
  before_layer(values, stashed);
}

// Adds up what operations cost.
class Prices : public Observer {
 public:
  explicit Prices(const std::function<double(const OpEvent&)>& seconds_of)
      : seconds_of_(seconds_of) {}
  void on_op_begin(const OpEvent& event) override {
    sum_s_ += seconds_of_(event);
  }
  double sum_s() const { return sum_s_; }

 private:
  const std::function<double(const OpEvent&)>& seconds_of_;
  double sum_s_ = 0;
};

}  // namespace

std::unique_ptr<LayerList> layers_of(const ModelConfig& config) {
  if (config.type == "mlp") return std::make_unique<MlpLayers>(config);
  if (config.is_image()) return resnet_layers(config);
  return std::make_unique<GptLayers>(config);
}

// --- Stage -------------------------------------------------------------------

Stage::Stage(const LayerList& layers, int begin, int end,
             const InitOptions& init, std::map<std::string, Tensor>* existing) {
  std::map<std::string, Tensor> own;
  auto& seen = existing != nullptr ? *existing : own;
  for (int i = begin; i < end; ++i) {
    layers_.push_back(make_layer(layers, i, init, seen));
    skips_.push_back(layers.skips(i));
    for (const std::string& name : skips_.back().pop) {
      const auto here = std::find(outgoing_.begin(), outgoing_.end(), name);
      if (here == outgoing_.end()) {
        incoming_.push_back(name);
      } else {
        outgoing_.erase(here);
      }
    }
    for (const std::string& name : skips_.back().stash) {
      outgoing_.push_back(name);
    }
  }
  // Sender and receiver agree on an order
  std::sort(incoming_.begin(), incoming_.end());
  std::sort(outgoing_.begin(), outgoing_.end());
}

Stage::Stage(const Stage& other)
    : Module(other),
      skips_(other.skips_),
      incoming_(other.incoming_),
      outgoing_(other.outgoing_) {
  for (const auto& layer : other.layers_) layers_.push_back(layer->clone());
}

Tensors Stage::forward_all(const Tensors& inputs) {
  SB_CHECK(inputs.size() > incoming_.size(), "stage: ", inputs.size(),
           " inputs, of which ", incoming_.size(),
           " are skip connections; the first layer needs at least one");
  Tensors values(inputs.begin(),
                 inputs.end() - static_cast<std::ptrdiff_t>(incoming_.size()));
  std::map<std::string, Tensor> stashed;
  for (std::size_t i = 0; i < incoming_.size(); ++i) {
    stashed[incoming_[i]] = inputs[values.size() + i];
  }
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    for (const std::string& name : skips_[i].pop) {
      values.push_back(stashed.at(name));
      stashed.erase(name);
    }
    values = (*layers_[i])(values);
    const auto& stash = skips_[i].stash;
    SB_CHECK(values.size() > stash.size(), "stage: a layer returns ",
             values.size(), " tensors and stashes ", stash.size(),
             "; at least one goes to the next layer");
    for (auto name = stash.rbegin(); name != stash.rend(); ++name) {
      stashed[*name] = values.back();
      values.pop_back();
    }
  }
  for (const std::string& name : outgoing_) values.push_back(stashed.at(name));
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

std::vector<double> layer_seconds(
    const LayerList& layers, const Tensors& inputs, DType dtype,
    const std::function<double(const OpEvent&)>& seconds_of) {
  const std::vector<LayerInput> specs = trace_shapes(layers, inputs, dtype);
  RankContext context(Device::meta());
  const RankContext::Scope scope(context);
  InitOptions init;
  init.dtype = dtype;
  std::vector<double> seconds;
  for (int i = 0; i < layers.size(); ++i) {
    const LayerInput& spec = specs[static_cast<std::size_t>(i)];
    Stage layer(layers, i, i + 1, init);
    Tensors values;
    const auto add = [&](const ValueSpec& value) {
      values.push_back(Tensor::empty(value.shape, {value.dtype, Device()}));
      if (value.needs_grad) values.back().set_requires_grad();
    };
    for (const ValueSpec& value : spec.values) add(value);
    for (const std::string& name : layer.incoming()) add(spec.skips.at(name));
    Prices prices(seconds_of);
    context.add_observer(&prices);
    Tensors roots, grads;
    for (const Tensor& output : layer(values)) {
      if (!output.requires_grad()) continue;
      roots.push_back(output);
      grads.push_back(output.empty_like());
    }
    if (!roots.empty()) autograd::backward(roots, grads);
    context.remove_observer(&prices);
    seconds.push_back(prices.sum_s());
  }
  return seconds;
}

// --- Shapes ------------------------------------------------------------------

std::vector<LayerInput> trace_shapes(const LayerList& layers,
                                     const Tensors& inputs, DType dtype) {
  std::vector<LayerInput> result;
  const auto spec_of = [](const Tensor& value) {
    return ValueSpec{value.shape(), value.dtype(), value.requires_grad()};
  };
  walk_on_shapes(layers, inputs, dtype, [&](const Tensors& values,
                                            const auto& stashed) {
    LayerInput input;
    for (const Tensor& value : values) input.values.push_back(spec_of(value));
    for (const auto& [name, value] : stashed) {
      input.skips[name] = spec_of(value);
    }
    input.first_random_op = RankContext::current().random.next_op;
    result.push_back(std::move(input));
  });
  return result;
}

std::vector<SkipRoute> skip_routes(const LayerList& layers,
                                   const std::vector<int>& cuts) {
  std::map<std::string, int> stashed_by, popped_by;
  std::vector<std::string> names;
  for (int i = 0; i < layers.size(); ++i) {
    const Skips skips = layers.skips(i);
    for (const std::string& name : skips.pop) {
      SB_CHECK(stashed_by.count(name) != 0, "skip '", name, "': layer ", i,
               " (", layers.name(i), ") pops it, and no layer before stashes it");
      const auto [first, is_new] = popped_by.emplace(name, i);
      SB_CHECK(is_new, "skip '", name, "': layers ", first->second, " and ", i,
               " pop it; a stashed tensor is popped once");
    }
    for (const std::string& name : skips.stash) {
      const auto [first, is_new] = stashed_by.emplace(name, i);
      SB_CHECK(is_new, "skip '", name, "': layers ", first->second, " and ", i,
               " stash it; a name is unique in its namespace");
      names.push_back(name);
    }
  }
  const auto stage_of = [&](int layer) {
    const auto end = std::upper_bound(cuts.begin(), cuts.end(), layer);
    return static_cast<int>(end - cuts.begin()) - 1;
  };
  std::vector<SkipRoute> routes;
  for (const std::string& name : names) {
    SB_CHECK(popped_by.count(name) != 0, "skip '", name, "': layer ",
             stashed_by[name], " (", layers.name(stashed_by[name]),
             ") stashes it, and no layer pops it");
    const SkipRoute route{name, stage_of(stashed_by[name]),
                          stage_of(popped_by[name])};
    if (route.from_stage != route.to_stage) routes.push_back(route);
  }
  return routes;
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
