#include "chapters/06_1f1b/post_validation.h"

#include <cmath>

#include "core/inplace.h"

namespace shardbook::pipeline {
namespace {

// Tags; tags of activations count up from 0.
constexpr int kPartial = 1 << 29, kFull = kPartial + 1;

double square(double x) { return x * x; }

}  // namespace

void NumberMail::send(double number, int to, int tag) {
  const MemoryScope kind(MemoryKind::kCommunication);
  Sent sent;
  sent.value = Tensor::full({}, number, {DType::kF64, Device()});
  sent.work = group_.send(sent.value, to, tag, label_);
  sent_.push_back(std::move(sent));
}

double NumberMail::receive(int from, int tag) {
  const MemoryScope kind(MemoryKind::kCommunication);
  const Tensor number = Tensor::empty({}, {DType::kF64, Device()});
  group_.recv(number, from, tag, label_).wait();
  return number.item();
}

void NumberMail::forget_arrived() {
  while (sent_.size() > 1 && sent_.front().work.done()) sent_.pop_front();
}

void NumberMail::finish() {
  for (Sent& each : sent_) each.work.wait();
  sent_.clear();
}

Verdict verdict_of(double squared_norm, double clip) {
  Verdict verdict;
  verdict.skips = !std::isfinite(squared_norm);
  if (clip > 0 && !verdict.skips) {
    verdict.factor = clip_factor(std::sqrt(squared_norm), clip);
  }
  return verdict;
}

PostValidation::PostValidation(PipelineModel& model, Optimizer& optimizer,
                               double clip, ProcessGroup& world)
    : model_(model),
      optimizer_(optimizer),
      clip_(clip),
      world_(world),
      norms_(world, "norm") {}

// --- On the way down ---------------------------------------------------------

void PostValidation::step() {
  const int rank = world_.rank(), last = world_.size() - 1;
  norms_.finish();  // of the previous step
  lr_ = optimizer_.options().lr;
  // Sum in rank order, as an all-reduce does
  const double here = square(shardbook::grad_norm(model_.counted_parameters()));
  squared_norm_ = rank == 0 ? here : norms_.receive(rank - 1, kPartial) + here;
  if (rank < last) norms_.send(squared_norm_, rank + 1, kPartial);

  const Verdict so_far = verdict_of(squared_norm_, clip_);
  is_pending_ = true;
  has_stepped_ = !so_far.skips && so_far.factor == 1;
  // Always save: the cost of a step must not depend on the data
  if (rank < last) save();
  if (has_stepped_) apply(so_far);
}

// --- On the way back ---------------------------------------------------------

bool PostValidation::validate() {
  if (!is_pending_) return true;
  is_pending_ = false;
  const int rank = world_.rank(), last = world_.size() - 1;
  const double all =
      rank == last ? squared_norm_ : norms_.receive(rank + 1, kFull);
  if (rank > 0) norms_.send(all, rank - 1, kFull);

  const Verdict verdict = verdict_of(all, clip_);
  const bool is_amended = verdict.skips || verdict.factor != 1;
  if (is_amended && has_stepped_) roll_back();
  if (is_amended && !verdict.skips) {
    // The next step's learning rate may be set already
    const double lr = optimizer_.options().lr;
    optimizer_.set_lr(lr_);
    apply(verdict);
    optimizer_.set_lr(lr);
  }
  for (const Tensor& each : model_.parameters()) each.clear_grad();
  parameters_.clear();
  slots_.clear();
  grad_norm_ = std::sqrt(all);
  num_amended_ += is_amended ? 1 : 0;
  return !is_amended;
}

double PostValidation::predicted_bytes() const {
  const int neighbours =
      (world_.rank() > 0 ? 1 : 0) + (world_.rank() + 1 < world_.size() ? 1 : 0);
  return 8.0 * neighbours;
}

void PostValidation::apply(const Verdict& verdict) {
  if (clip_ > 0) {
    for (const Tensor& each : model_.parameters()) {
      if (each.grad().defined()) scale_in_place(each.grad(), verdict.factor);
    }
  }
  optimizer_.step();
}

// --- Copies for undoing a step -----------------------------------------------

void PostValidation::save() {
  const PhaseScope phase(Phase::kOptimizer);
  {
    const MemoryScope kind(MemoryKind::kParameter);
    for (const Tensor& each : model_.parameters()) {
      parameters_.push_back(each.clone());
    }
  }
  const MemoryScope kind(MemoryKind::kOptimizerState);
  slots_ = optimizer_.slots();
  for (OptimizerSlot& slot : slots_) {
    for (Tensor& each : slot.state) each = each.clone();
    if (slot.master.defined()) slot.master = slot.master.clone();
  }
}

void PostValidation::roll_back() {
  if (parameters_.empty()) return;
  const PhaseScope phase(Phase::kOptimizer);
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    model_.parameters()[i].copy_from(parameters_[i]);
  }
  optimizer_.slots() = slots_;
}

}  // namespace shardbook::pipeline
