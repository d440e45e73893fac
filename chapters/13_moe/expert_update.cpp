#include "chapters/13_moe/expert_update.h"

#include <algorithm>
#include <cmath>

#include "chapters/common/sharded/parts.h"
#include "core/check.h"
#include "core/context.h"

namespace shardbook::moe {

ExpertUpdate::ExpertUpdate(const std::vector<NamedTensor>& parameters,
                           const std::vector<ParameterGroup>& groups,
                           ProcessGroup& world,
                           const zero::ZeroOptions& options,
                           const std::string& optimizer,
                           const OptimizerOptions& optimizer_options)
    : world_(world),
      options_(options),
      dp_(groups.at(0).replicas.size()),
      parameters_(parameters) {
  for (const ParameterGroup& each : groups) {
    parts_.push_back(Part{each, {}, {}, nullptr, nullptr});
  }
  Tensors all;
  for (const NamedTensor& each : parameters) {
    const auto part = std::find_if(parts_.begin(), parts_.end(), [&](Part& p) {
      return p.group.contains(each.name);
    });
    SB_CHECK(part != parts_.end(), "moe: no group of ranks holds parameter '",
             each.name, "'");
    part->parameters.push_back(each);
    part->tensors.push_back(each.tensor);
    all.push_back(each.tensor);
    has_f16_ = has_f16_ || each.tensor.dtype() == DType::kF16;
    if (part->group.replicas.rank() == 0 && part->counts(each.name)) {
      counted_.push_back(each.tensor);
    }
  }
  if (options.stage == 0) {
    optimizer_ = make_optimizer(optimizer, all, optimizer_options);
    if (options.master_copies) optimizer_->keep_master_copies();
    return;
  }
  for (Part& part : parts_) {
    if (part.parameters.empty()) continue;
    part.module = std::make_unique<ParameterSubset>(part.parameters);
    part.zero = zero::make_zero(*part.module, part.group.replicas, options,
                                optimizer, optimizer_options);
  }
  begin_backward(true);
}

std::vector<zero::ZeroOptimizer*> ExpertUpdate::zeros() const {
  std::vector<zero::ZeroOptimizer*> all;
  for (const Part& part : parts_) {
    if (part.zero) all.push_back(part.zero.get());
  }
  return all;
}

Optimizer& ExpertUpdate::optimizer() {
  return optimizer_ ? *optimizer_ : zeros().at(0)->optimizer();
}

double ExpertUpdate::scale_of(const Part& part) const {
  // Experts' gradients are divided by dp: by ZeRO's group inside ZeRO, and by
  // the rest of dp as by a loss scale
  const double left = static_cast<double>(dp_) / part.group.replicas.size();
  return loss_scale_ * left;
}

void ExpertUpdate::begin_backward(bool is_last, double loss_scale) {
  loss_scale_ = loss_scale;
  for (const Part& part : parts_) {
    if (!part.zero) continue;
    part.zero->set_boundary(is_last);
    part.zero->set_loss_scale(scale_of(part));
  }
}

void ExpertUpdate::reduce() {
  if (!optimizer_) return;
  // Dense gradients over DP, those of experts over their replicas
  const double share = 1.0 / dp_;
  for (const Part& part : parts_) {
    sum_gradients(part.group.replicas, part.tensors, part.group.label, share);
  }
}

double ExpertUpdate::norm() {
  double squares = 0;
  if (optimizer_) {
    const double norm = grad_norm(counted_) / loss_scale_;
    squares = norm * norm;
  }
  for (const Part& part : parts_) {
    if (!part.zero) continue;
    // An element of a shard has one owner among its replicas
    const std::vector<NamedTensor> own = part.zero->own_gradients();
    double total = part.group.counts ? 0 : part.zero->sum_of_squares();
    for (const NamedTensor& each : own) {
      if (!part.group.counts || !part.counts(each.name)) continue;
      total += sum_of_squares(each.tensor);
    }
    const double scale = scale_of(part);
    squares += total / (scale * scale);
  }
  return std::sqrt(sum_over_ranks(world_, squares, "norm"));
}

bool ExpertUpdate::apply(double norm) {
  // All ranks have the same norm, so they skip together
  const bool is_skipped = has_f16_ && !std::isfinite(norm);
  if (is_skipped) num_skipped_ += 1;
  for (zero::ZeroOptimizer* zero : zeros()) {
    zero->set_lr(optimizer().options().lr);
    zero->step(norm);
  }
  if (!optimizer_) return !is_skipped;
  const PhaseScope phase(Phase::kOptimizer);
  if (!is_skipped) {
    double factor = 1 / loss_scale_;
    if (options_.clip > 0) factor *= clip_factor(norm, options_.clip);
    optimizer_->step(factor);
  }
  for (const Tensor& each : optimizer_->parameters()) each.clear_grad();
  return !is_skipped;
}

double ExpertUpdate::publish_bytes() const {
  double bytes = 0;
  for (const auto* zero : zeros()) bytes += zero->predicted_load_bytes();
  return bytes;
}

TrainingState ExpertUpdate::state(const std::vector<NamedTensor>& more) {
  if (!optimizer_) return joint_state(zeros());
  TrainingState state;
  add_whole(state, parameters_, *optimizer_);
  add_whole(state, more, *optimizer_);
  return state;
}

TrainingState joint_state(const std::vector<zero::ZeroOptimizer*>& zeros) {
  TrainingState state;
  std::vector<decltype(state.loaded)> loaded;
  for (zero::ZeroOptimizer* zero : zeros) {
    TrainingState own = zero->state();
    state.parts.insert(state.parts.end(), own.parts.begin(), own.parts.end());
    state.numbers.insert(own.numbers.begin(), own.numbers.end());
    if (own.loaded) loaded.push_back(own.loaded);
  }
  state.loaded = [loaded](const std::map<std::string, double>& numbers) {
    for (const auto& each : loaded) each(numbers);
  };
  return state;
}

}  // namespace shardbook::moe
