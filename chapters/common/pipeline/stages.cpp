#include "chapters/common/pipeline/stages.h"

#include <algorithm>
#include <utility>

#include "core/autograd.h"
#include "core/check.h"
#include "core/context.h"

namespace shardbook {
namespace {

// Makes layer i with existing parameters from `seen`, and adds the others to
// it. No parameter exists twice on the device.
std::unique_ptr<Module> make_layer(const LayerList& layers, int i,
                                   const InitOptions& init,
                                   std::map<std::string, Tensor>& seen) {
  const auto parameters = layer_parameters_on_shapes(layers, i);
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

}  // namespace

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

std::vector<NamedTensor> layer_parameters_on_shapes(const LayerList& layers,
                                                    int layer) {
  InitOptions init;
  init.device = Device::meta();
  return layers.on_shapes().make(layer, init)->named_parameters();
}

// --- What crosses the cuts ---------------------------------------------------

// Runs forward layer by layer, in a context of its own, which hides the run from
// the caller's clock and ledger.
std::vector<LayerInput> trace_shapes(const LayerList& real_layers,
                                     const Tensors& inputs, DType dtype) {
  const LayerList& layers = real_layers.on_shapes();
  RankContext context(Device::meta());
  const RankContext::Scope scope(context);
  InitOptions init;
  init.dtype = dtype;
  const auto spec_of = [](const Tensor& value) {
    return ValueSpec{value.shape(), value.dtype(), value.requires_grad()};
  };
  Tensors values;
  for (const Tensor& input : inputs) {
    values.push_back(Tensor::empty(input.shape(), {input.dtype(), Device()}));
  }
  std::map<std::string, Tensor> stashed;
  std::vector<LayerInput> result;
  for (int i = 0;; ++i) {
    LayerInput& input = result.emplace_back();
    for (const Tensor& value : values) input.values.push_back(spec_of(value));
    for (const auto& [name, value] : stashed) {
      input.skips[name] = spec_of(value);
    }
    input.first_random_op = context.random.next_op;
    if (i == layers.size()) return result;
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

// --- A micro-batch inside a stage --------------------------------------------

StageRun run_forward(const StageFunction& stage, const Tensors& received,
                     const LayerInput& spec) {
  StageRun run;
  for (std::size_t i = 0; i < received.size(); ++i) {
    const bool needs_grad = i < spec.values.size()
                                ? spec.values[i].needs_grad
                                : is_floating(received[i].dtype());
    run.inputs.push_back(needs_grad ? autograd::graph_input(received[i])
                                    : received[i]);
  }
  run.outputs = stage(run.inputs);
  // The graph must not keep the outputs, which are only sent. It ends in a node
  // without elements, whose backward returns the outputs' gradients.
  Tensors ends;
  for (const Tensor& output : run.outputs) {
    run.needs_grad.push_back(output.requires_grad());
    if (output.requires_grad()) ends.push_back(output);
  }
  if (ends.empty()) return run;
  run.grad_outputs = std::make_shared<Tensors>();
  run.end = Tensor::empty({0});
  autograd::record(
      "stage", ends, {run.end},
      [grads = run.grad_outputs](const Tensors&) { return std::move(*grads); });
  return run;
}

StageRun run_forward(Module& stage, const Tensors& received,
                     const LayerInput& spec) {
  return run_forward([&](const Tensors& inputs) { return stage(inputs); },
                     received, spec);
}

StageRun run_forward_again(const StageFunction& stage, const Tensors& received,
                           const LayerInput& spec, const RandomState& random) {
  const ContextValue<RandomState> replay(&RankContext::random, random);
  const ContextValue<bool> flag(&RankContext::is_recomputing, true);
  return run_forward(stage, received, spec);
}

Tensors run_backward(StageRun run, Tensors grad_outputs) {
  run.outputs.clear();
  bool any = false;
  for (std::size_t i = 0; i < run.needs_grad.size(); ++i) {
    if (!run.needs_grad[i]) continue;
    any = any || grad_outputs[i].defined();
    run.grad_outputs->push_back(std::move(grad_outputs[i]));
  }
  grad_outputs.clear();
  if (any) autograd::backward({std::move(run.end)}, {Tensor::empty({0})});
  Tensors result;
  for (const Tensor& input : run.inputs) {
    result.push_back(input.requires_grad() ? input.grad() : Tensor());
    // A deferred weight gradient may keep the input, and this gradient with it
    if (input.requires_grad()) input.clear_grad();
  }
  return result;
}

}  // namespace shardbook
