#include "chapters/06_1f1b/weight_stash.h"

#include <algorithm>
#include <cmath>

#include "core/autograd.h"
#include "core/check.h"
#include "core/inplace.h"
#include "core/ops.h"

namespace shardbook::pipeline {

// --- Versions ----------------------------------------------------------------

WeightStash::WeightStash(Tensors parameters)
    : parameters_(std::move(parameters)), versions_(1) {
  for (const Tensor& each : parameters_) {
    versions_[0].push_back(each.detach());
  }
}

void WeightStash::load(int version) {
  SB_CHECK(version >= oldest_ && version <= newest(), "weight stash: version ",
           version, " is not kept; there are ", oldest_, " to ", newest());
  const Tensors& values =
      versions_[static_cast<std::size_t>(version - oldest_)];
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    parameters_[i].set_data(values[i]);
  }
}

void WeightStash::advance(int oldest_needed) {
  load(newest());
  while (oldest_ < oldest_needed && size() > 1) {
    versions_.pop_front();
    ++oldest_;
  }
  if (oldest_ < oldest_needed) {
    ++oldest_;  // the newest is read by nobody: it becomes the next
    return;
  }
  const MemoryScope kind(MemoryKind::kParameter);
  const PhaseScope phase(Phase::kOptimizer);
  Tensors next;
  for (const Tensor& each : versions_.back()) next.push_back(each.clone());
  versions_.push_back(std::move(next));
  load(newest());
}

// --- Updates in between ------------------------------------------------------

StashedUpdates::StashedUpdates(const Schedule& schedule, PipelineModel& model,
                               Optimizer& optimizer, int rank, bool stashes)
    : model_(model),
      optimizer_(optimizer),
      stashes_(stashes),
      stash_(model.parameters()) {
  SB_CHECK(schedule.num_chunks(rank) == 1, "schedule '", schedule.name,
           "': rank ", rank,
           " has several stages; updates in between are for "
           "ranks with one");
  stage_ = schedule.stage_at(rank, 0);
  replicas_ = static_cast<int>(
      model.layout().owners[static_cast<std::size_t>(stage_)].size());
  for (const VersionRecord& each : versions(schedule)) {
    if (each.stage != stage_) continue;
    if (schedule.place(each.micro_batch, stage_).rank != rank) continue;
    visits_.push_back({each.micro_batch, each.read});
  }
}

const StashedUpdates::Visit& StashedUpdates::visit_of(int micro_batch) const {
  const auto found = std::find_if(
      visits_.begin(), visits_.end(),
      [&](const Visit& each) { return each.micro_batch == micro_batch; });
  SB_CHECK(found != visits_.end(), "weight stash: micro-batch ", micro_batch,
           " does not come to stage ", stage_);
  return *found;
}

void StashedUpdates::before_forward(int micro_batch) {
  stash_.load(visit_of(micro_batch).version);
}

void StashedUpdates::before_backward(int micro_batch, const StageRun& run,
                                     const Tensors& grad_outputs) {
  VersionUse use;
  use.stage = stage_;
  use.micro_batch = micro_batch;
  use.forward = visit_of(micro_batch).version;
  use.newest = stash_.newest();
  use.backward = stashes_ ? use.forward : use.newest;
  if (use.backward != use.forward) {
    use.error = gradient_error(use, run, grad_outputs);
  }
  uses_.push_back(use);
  stash_.load(use.backward);
}

void StashedUpdates::after_backward(int) { stash_.load(stash_.newest()); }

void StashedUpdates::update(int micro_batch) {
  if (replicas_ > 1) {
    model_.reduce_shared_gradients();
    for (const Tensor& each : model_.parameters()) {
      scale_in_place(each.grad(), 1.0 / replicas_);
    }
  }
  grad_norm_ = shardbook::grad_norm(model_.parameters());
  // Whoever comes next needs at least the version that it has read or will
  int needed = stash_.newest() + 1;
  for (const Visit& each : visits_) {
    if (each.micro_batch <= micro_batch) continue;
    needed = each.version;
    break;
  }
  stash_.advance(needed);
  optimizer_.step();
  for (const Tensor& each : model_.parameters()) each.clear_grad();
}

// --- The lab -----------------------------------------------------------------

// The same graph twice, gradients of weights and inputs: once with the
// forward's weights, which is the gradient, and once with the newest, which is
// not the gradient of anything.
double StashedUpdates::gradient_error(const VersionUse& use,
                                      const StageRun& run,
                                      const Tensors& grad_outputs) {
  Tensors before;
  for (const Tensor& each : model_.parameters()) {
    before.push_back(each.grad());
    each.set_grad(Tensor());
  }
  const auto gradients = [&](int version) {
    stash_.load(version);
    for (std::size_t i = 0; i < run.needs_grad.size(); ++i) {
      if (run.needs_grad[i]) run.grad_outputs->push_back(grad_outputs[i]);
    }
    autograd::backward({run.end}, {Tensor::empty({0})}, /*retain_graph=*/true);
    run.grad_outputs->clear();
    Tensors values;
    for (const Tensor& each : model_.parameters()) {
      values.push_back(each.grad().defined() ? each.grad() : each.zeros_like());
      each.set_grad(Tensor());
    }
    for (const Tensor& input : run.inputs) {
      if (!input.requires_grad()) continue;
      values.push_back(input.grad());
      input.set_grad(Tensor());
    }
    return values;
  };
  const Tensors truth = gradients(use.forward), wrong = gradients(use.newest);
  for (std::size_t i = 0; i < before.size(); ++i) {
    model_.parameters()[i].set_grad(before[i]);
  }
  const NoGrad no_grad;
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < truth.size(); ++i) {
    const Tensor apart = sub(wrong[i], truth[i]);
    difference += sum(mul(apart, apart)).item();
    norm += sum(mul(truth[i], truth[i])).item();
  }
  return norm > 0 ? std::sqrt(difference / norm) : 0;
}

}  // namespace shardbook::pipeline
