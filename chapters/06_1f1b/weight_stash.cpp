#include "chapters/06_1f1b/weight_stash.h"

#include <algorithm>
#include <cmath>

#include "core/autograd.h"
#include "core/check.h"
#include "core/inplace.h"
#include "core/ops.h"
#include "core/tensor_storage.h"
#include "core/weight_gradients.h"

namespace shardbook::pipeline {

// --- Versions ----------------------------------------------------------------

WeightStash::WeightStash(Tensors parameters)
    : parameters_(std::move(parameters)), versions_(1) {
  for (const Tensor& each : parameters_) versions_[0].push_back(each.detach());
}

void WeightStash::load(int version) {
  SB_CHECK(version >= oldest_ && version <= newest(), "weight stash: version ",
           version, " is not kept; there are ", oldest_, " to ", newest());
  const Tensors& values =
      versions_[static_cast<std::size_t>(version - oldest_)];
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    set_data(parameters_[i], values[i]);
  }
}

void WeightStash::advance(int oldest_needed) {
  load(newest());
  while (oldest_ < oldest_needed && size() > 1) {
    versions_.pop_front();
    ++oldest_;
  }
  if (oldest_ < oldest_needed) {
    ++oldest_;  // the newest is not read again: reuse it
    return;
  }
  const MemoryScope kind(MemoryKind::kParameter);
  const PhaseScope phase(Phase::kOptimizer);
  Tensors next;
  for (const Tensor& each : versions_.back()) next.push_back(each.clone());
  versions_.push_back(std::move(next));
  load(newest());
}

// --- Updates inside the lists ------------------------------------------------

StashedUpdates::StashedUpdates(const Schedule& schedule, PipelineModel& model,
                               Optimizer& optimizer, int rank, bool stashes)
    : schedule_(schedule),
      reads_(schedule),
      model_(model),
      optimizer_(optimizer),
      stashes_(stashes),
      stash_(model.parameters()) {
  stage_ = schedule.stage_at(rank, 0);
  replicas_ = schedule.num_replicas(stage_);
  const auto& list = schedule.actions[static_cast<std::size_t>(rank)];
  Schedule::Part steady;
  if (schedule.repeats > 0) {
    steady = schedule.steady[static_cast<std::size_t>(rank)];
  }
  for (int i = 0; static_cast<std::size_t>(i) < list.size(); ++i) {
    const Action& each = list[static_cast<std::size_t>(i)];
    if (each.kind != ActionKind::kForward) continue;
    oldest_from_.push_back(version_of(each.micro_batch));
    steady_forwards_ += i >= steady.begin && i < steady.end ? 1 : 0;
  }
  for (std::size_t n = oldest_from_.size(); n-- > 1;) {
    oldest_from_[n - 1] = std::min(oldest_from_[n - 1], oldest_from_[n]);
  }
}

int StashedUpdates::version_of(int micro_batch) const {
  const int listed = schedule_.listed(micro_batch);
  return reads_.of(stage_, listed) +
         (micro_batch - listed) / reads_.micro_batches_per_update(stage_);
}

// The oldest version that a later forward or a pending backward reads.
int StashedUpdates::oldest_needed() const {
  int needed = stash_.newest() + 1;
  const auto listed = static_cast<int>(oldest_from_.size());
  if (forwards_ < listed + schedule_.repeats * steady_forwards_) {
    // A forward in a repeated round is one of the list, `rounds` rounds later
    const int rounds =
        forwards_ < listed ? 0 : (forwards_ - listed) / steady_forwards_ + 1;
    const int next = forwards_ - rounds * steady_forwards_;
    const int later =
        rounds * schedule_.period / reads_.micro_batches_per_update(stage_);
    needed =
        std::min(needed, oldest_from_[static_cast<std::size_t>(next)] + later);
  }
  if (!in_use_.empty()) needed = std::min(needed, *in_use_.begin());
  return needed;
}

void StashedUpdates::before_forward(int micro_batch) {
  // Read this mini-batch's version, and keep it until its backward
  const int version = version_of(micro_batch);
  stash_.load(version);
  in_use_.insert(version);
  ++forwards_;
}

void StashedUpdates::before_recompute(int micro_batch) {
  stash_.load(version_of(micro_batch));
}

void StashedUpdates::before_backward(int micro_batch, const StageRun& run,
                                     const Tensors& grad_outputs) {
  VersionUse use;
  use.stage = stage_;
  use.micro_batch = micro_batch;
  use.forward = version_of(micro_batch);
  use.newest = stash_.newest();
  use.backward = stashes_ ? use.forward : use.newest;
  if (use.backward != use.forward) {
    use.error = gradient_error(use, run, grad_outputs);
  }
  if (micro_batch < schedule_.num_micro_batches) uses_.push_back(use);
  stash_.load(use.backward);
}

void StashedUpdates::after_backward(int micro_batch) {
  in_use_.erase(in_use_.find(version_of(micro_batch)));
  stash_.load(stash_.newest());
}

void StashedUpdates::update(int) {
  if (replicas_ > 1) {
    model_.reduce_shared_gradients();
    for (const Tensor& each : model_.parameters()) {
      scale_in_place(each.grad(), 1.0 / replicas_);
    }
  }
  grad_norm_ = shardbook::grad_norm(model_.parameters());
  stash_.advance(oldest_needed());
  optimizer_.step();
  for (const Tensor& each : model_.parameters()) each.clear_grad();
}

// --- The error of a gradient -------------------------------------------------

// Runs backward on the same graph twice, and compares the gradients of weights
// and inputs: with the forward's weights, which gives the right gradient, and
// with the newest weights.
double StashedUpdates::gradient_error(const VersionUse& use,
                                      const StageRun& run,
                                      const Tensors& grad_outputs) {
  // Compute whole gradients, even if the coming backward is an I
  const ContextValue<WeightGradients*> at_once(&RankContext::weight_gradients,
                                               nullptr);
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
