#include "chapters/common/pipeline/pipeline.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "chapters/common/models/checkpoint.h"
#include "core/autograd.h"
#include "core/check.h"
#include "core/inplace.h"
#include "core/ops.h"

namespace shardbook {
namespace {

std::string spot(int micro_batch, int stage) {
  return "micro-batch " + std::to_string(micro_batch) + " stage " +
         std::to_string(stage);
}

}  // namespace

PipelineLayout one_stage_per_rank(const std::vector<int>& cuts) {
  PipelineLayout layout;
  layout.cuts = cuts;
  for (std::size_t s = 0; s + 1 < cuts.size(); ++s) {
    layout.owners.push_back({static_cast<int>(s)});
  }
  return layout;
}

// --- The rank's stages -------------------------------------------------------

PipelineModel::PipelineModel(const Options& options,
                             std::shared_ptr<const LayerList> layers,
                             PipelineLayout layout, ProcessGroup& world)
    : layout_(std::move(layout)),
      layers_(std::move(layers)),
      world_(world),
      dtype_(options.dtype) {
  InitOptions init;
  init.seed = options.seed;
  init.dtype = options.dtype;
  std::map<std::string, Tensor> mine;
  // Who holds which parameter: known to all ranks without asking
  std::map<std::string, std::set<int>> holders;
  InitOptions on_meta;
  on_meta.device = Device::meta();
  for (int s = 0; s < layout_.num_stages(); ++s) {
    const auto& owners = layout_.owners[static_cast<std::size_t>(s)];
    const int begin = layout_.cuts[static_cast<std::size_t>(s)];
    const int end = layout_.cuts[static_cast<std::size_t>(s) + 1];
    Stage shapes(*layers_, begin, end, on_meta);
    for (const NamedTensor& each : shapes.named_parameters()) {
      holders[each.name].insert(owners.begin(), owners.end());
    }
    if (std::find(owners.begin(), owners.end(), world.rank()) == owners.end()) {
      continue;
    }
    auto stage = std::make_unique<Stage>(*layers_, begin, end, init, &mine);
    if (!options.load.empty()) load_model(options.load, *stage);
    for (const NamedTensor& each : stage->named_parameters()) {
      const auto same = [&](const Tensor& p) { return p.is_same(each.tensor); };
      if (std::any_of(parameters_.begin(), parameters_.end(), same)) continue;
      parameters_.push_back(each.tensor);
    }
    stages_.emplace(s, std::move(stage));
  }
  // A group per set of holders, made by all ranks in the same order
  std::map<std::vector<int>, std::shared_ptr<ProcessGroup>> groups;
  for (const auto& [name, ranks] : holders) {
    if (ranks.size() < 2) continue;
    const std::vector<int> members(ranks.begin(), ranks.end());
    if (groups.count(members) == 0) {
      groups[members] =
          world.subgroup(members, "tied " + std::to_string(groups.size()));
    }
    if (groups[members] == nullptr) continue;
    shared_.push_back({mine.at(name), groups[members]});
  }
  for (const auto& [name, tensor] : mine) {
    if (!tensor.requires_grad()) continue;
    if (*holders[name].begin() == world.rank()) own_.push_back(tensor);
  }
}

Stage& PipelineModel::stage(int s) {
  const auto found = stages_.find(s);
  SB_CHECK(found != stages_.end(), "stage ", s, ": not on rank ",
           world_.rank());
  return *found->second;
}

void PipelineModel::reduce_shared_gradients() {
  for (const Shared& each : shared_) {
    Tensor grad = each.parameter.grad();
    if (!grad.defined()) {
      MemoryScope kind(MemoryKind::kGradient);
      grad = each.parameter.zeros_like();
      each.parameter.set_grad(grad);
    }
    each.group->all_reduce(grad, ReduceOp::kSum, "tied gradient").wait();
  }
}

StepResult PipelineModel::update(const Options& options, Optimizer& optimizer,
                                 double local_loss) {
  const double norm_here = grad_norm(own_);
  Tensor sums;
  {
    MemoryScope kind(MemoryKind::kCommunication);
    sums = Tensor::full({2}, local_loss, {DType::kF64, Device()});
    sums.rows_view(1, 2).fill(norm_here * norm_here);
  }
  world_.all_reduce(sums, ReduceOp::kSum, "loss and norm").wait();
  StepResult result;
  result.loss = sums.rows_view(0, 1).item();
  result.grad_norm = std::sqrt(sums.rows_view(1, 2).item());
  if (options.clip > 0) {
    const double factor = clip_factor(result.grad_norm, options.clip);
    PhaseScope phase(Phase::kOptimizer);
    for (const Tensor& parameter : parameters_) {
      if (parameter.grad().defined()) scale_in_place(parameter.grad(), factor);
    }
  }
  optimizer.step();
  for (const Tensor& parameter : parameters_) parameter.clear_grad();
  return result;
}

double PipelineModel::predicted_update_bytes() const {
  const auto all_reduce = [](double bytes, int ranks) {
    return 2.0 * (ranks - 1) / ranks * bytes;
  };
  double bytes = all_reduce(16, world_.size());
  for (const Shared& each : shared_) {
    bytes += all_reduce(static_cast<double>(each.parameter.bytes()),
                        each.group->size());
  }
  return bytes;
}

std::vector<NamedTensor> PipelineModel::full_parameters() {
  InitOptions on_meta;
  on_meta.device = Device::meta();
  on_meta.dtype = dtype_;
  std::vector<NamedTensor> all;
  std::set<std::string> seen;
  int tag = 0;
  for (int s = 0; s < layout_.num_stages(); ++s) {
    const int owner = layout_.owners[static_cast<std::size_t>(s)].front();
    Stage shapes(*layers_, layout_.cuts[static_cast<std::size_t>(s)],
                 layout_.cuts[static_cast<std::size_t>(s) + 1], on_meta);
    std::vector<NamedTensor> members = shapes.named_parameters();
    for (const NamedTensor& buffer : shapes.named_buffers()) {
      members.push_back(buffer);
    }
    std::map<std::string, Tensor> here;
    if (owner == world_.rank()) {
      for (const NamedTensor& p : stage(s).named_parameters()) {
        here.emplace(p.name, p.tensor);
      }
      for (const NamedTensor& b : stage(s).named_buffers()) {
        here.emplace(b.name, b.tensor);
      }
    }
    for (const NamedTensor& member : members) {
      if (!seen.insert(member.name).second) continue;
      ++tag;
      if (owner == world_.rank() && world_.rank() == 0) {
        all.push_back({member.name, here.at(member.name)});
      } else if (owner == world_.rank()) {
        world_.send(here.at(member.name).detach(), 0, tag, member.name).wait();
      } else if (world_.rank() == 0) {
        // On the host: the device never holds the whole model
        Tensor value = Tensor::empty(
            member.tensor.shape(),
            {member.tensor.dtype(), RankContext::current().host()});
        world_.recv(value, owner, tag, member.name).wait();
        all.push_back({member.name, value});
      }
    }
  }
  return all;
}

// --- A micro-batch inside a stage -------------------------------------------

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
  // The graph must not keep what is only there to be sent: it ends in a node
  // that holds nothing, and is given the outputs' gradients when they are
  // there.
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
  }
  return result;
}

// --- Between stages ---------------------------------------------------------

void Mailbox::send(const Tensor& value, int to, int tag,
                   const std::string& label) {
  if (to == world_.rank()) {
    handed_over_[tag].push_back(value);
    return;
  }
  // Until the receiver has it, whenever this is
  value.set_memory_kind(MemoryKind::kCommunication);
  // The last message to each rank stays: flush waits until it has left
  sent_.erase(std::remove_if(sent_.begin(), sent_.end(),
                             [&](const Sent& each) {
                               return each.to == to && each.work.done();
                             }),
              sent_.end());
  Work work = world_.send(value, to, tag, label);
  sent_.push_back({to, std::move(work), value});
}

Tensor Mailbox::receive(const ValueSpec& spec, int from, int tag,
                        const std::string& label) {
  if (from == world_.rank()) {
    auto& waiting = handed_over_[tag];
    SB_CHECK(
        !waiting.empty(), "receive of ", label,
        ": nothing was made yet; the schedule takes it before it is there");
    Tensor value = waiting.front();
    waiting.pop_front();
    if (waiting.empty()) handed_over_.erase(tag);
    return value;
  }
  const MemoryScope kind(MemoryKind::kActivation);
  Tensor value = Tensor::empty(spec.shape, {spec.dtype, Device()});
  world_.recv(value, from, tag, label).wait();
  return value;
}

void Mailbox::send_forward(const Tensors& values, int micro_batch, int stage,
                           int to) {
  for (const Tensor& value : values) {
    send(value.detach(), to, tag(micro_batch, stage, false),
         "activations " + spot(micro_batch, stage));
  }
}

Tensors Mailbox::receive_forward(const LayerInput& spec, int micro_batch,
                                 int stage, int from) {
  Tensors values;
  for (const ValueSpec& value : spec.values) {
    values.push_back(receive(value, from, tag(micro_batch, stage, false),
                             "activations " + spot(micro_batch, stage)));
  }
  return values;
}

void Mailbox::send_backward(const Tensors& grads, const LayerInput& spec,
                            int micro_batch, int stage, int to) {
  for (std::size_t i = 0; i < grads.size(); ++i) {
    if (!spec.values[i].needs_grad) continue;
    Tensor grad = grads[i];
    if (!grad.defined()) {
      grad =
          Tensor::zeros(spec.values[i].shape, {spec.values[i].dtype, Device()});
    }
    send(grad, to, tag(micro_batch, stage, true),
         "gradients " + spot(micro_batch, stage));
  }
}

Tensors Mailbox::receive_backward(const LayerInput& spec, int micro_batch,
                                  int stage, int from) {
  Tensors grads;
  for (const ValueSpec& value : spec.values) {
    grads.push_back(value.needs_grad
                        ? receive(value, from, tag(micro_batch, stage, true),
                                  "gradients " + spot(micro_batch, stage))
                        : Tensor());
  }
  return grads;
}

void Mailbox::flush() {
  for (Sent& each : sent_) each.work.wait();
  sent_.clear();
}

double forward_bytes(const LayerInput& spec) {
  double bytes = 0;
  for (const ValueSpec& value : spec.values) {
    bytes += static_cast<double>(shape_numel(value.shape)) *
             static_cast<double>(dtype_bytes(value.dtype));
  }
  return bytes;
}

double backward_bytes(const LayerInput& spec) {
  double bytes = 0;
  for (const ValueSpec& value : spec.values) {
    if (!value.needs_grad) continue;
    bytes += static_cast<double>(shape_numel(value.shape)) *
             static_cast<double>(dtype_bytes(value.dtype));
  }
  return bytes;
}

}  // namespace shardbook
