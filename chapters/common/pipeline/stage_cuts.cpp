// Where to cut a model, and the shapes of the tensors that cross the cuts.

#include <algorithm>
#include <numeric>
#include <utility>

#include "chapters/common/pipeline/stages.h"
#include "core/autograd.h"
#include "core/check.h"
#include "core/context.h"

namespace shardbook {
namespace {

using NamedValues = std::map<std::string, Tensor>;

// Runs forward on shapes, layer by layer. `before_layer` gets the inputs of
// each layer and the stashed tensors, and at the end the outputs of the last
// layer. A context of its own hides the run from the caller's clock and ledger.
void walk_on_shapes(
    const LayerList& real_layers, const Tensors& inputs, DType dtype,
    const std::function<void(const Tensors&, const NamedValues&)>&
        before_layer) {
  const LayerList& layers = real_layers.on_shapes();
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

// Adds up the cost of operations.
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

std::vector<int> cut_by_cost(const std::vector<double>& costs, int num_stages) {
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
    for (const NamedTensor& each : layer_parameters_on_shapes(layers, i)) {
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
    Stage layer(layers.on_shapes(), i, i + 1, init);
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
  walk_on_shapes(
      layers, inputs, dtype, [&](const Tensors& values, const auto& stashed) {
        LayerInput input;
        for (const Tensor& value : values)
          input.values.push_back(spec_of(value));
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
               " (", layers.name(i),
               ") pops it, and no layer before stashes it");
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
    for (const NamedTensor& each : layer_parameters_on_shapes(layers, i)) {
      places[each.name].push_back(i);
    }
  }
  for (auto it = places.begin(); it != places.end();) {
    it = it->second.size() < 2 ? places.erase(it) : std::next(it);
  }
  return places;
}

}  // namespace shardbook
