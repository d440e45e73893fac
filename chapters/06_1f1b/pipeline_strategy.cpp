#include "chapters/06_1f1b/pipeline_strategy.h"

#include <algorithm>
#include <limits>

#include "chapters/common/run/exit_status.h"

namespace shardbook::pipeline {

PipelineStrategy::PipelineStrategy(const Options& options,
                                   const StrategyOptions& setup, Plan plan,
                                   ProcessGroup& pp)
    : options_(options),
      setup_(setup),
      plan_(std::move(plan)),
      pp_(pp),
      data_(Dataset::open(options, plan_.config)),
      feed_(options, data_, plan_.pieces),
      model_(options, plan_.layers, layout_of(plan_.schedule, plan_.cuts), pp),
      optimizer_(make_optimizer(options.optimizer, model_.parameters(),
                                options.optimizer_options)),
      losses_to_rank_0_(pp, "loss") {
  // Building a stage needs more memory than the stage keeps, such as a second
  // copy of a tied weight. The report covers only the steps
  RankContext::current().device.reset_peak_memory();
  if (plan_.is_asynchronous()) {
    updates_.emplace(plan_.schedule, model_, *optimizer_, pp.rank(),
                     setup.stash);
  }
  engine_options_.recompute = recompute_from_name(setup.recompute);
  engine_options_.early_recompute = setup.early_recompute;
  engine_options_.leaves_out_repetitions = setup.leaves_out_repetitions;
  engine_.emplace(plan_.schedule, model_, pp, feed_,
                  updates_ ? &*updates_ : nullptr, engine_options_);
  if (setup.post_validation) {
    post_.emplace(model_, *optimizer_, options.clip, pp);
  }
  if (post_ || updates_) {
    engine_->set_on_loss([this](int b, double loss) { note_loss(b, loss); });
  }
}

StepResult PipelineStrategy::step(std::int64_t step) {
  if (plan_.is_asynchronous()) return asynchronous_step(step);
  feed_.set_first_step(step);
  first_step_ = step;
  if (post_) return post_validated_step(step);
  const double loss = engine_->run();
  model_.reduce_shared_gradients();
  return model_.update(options_, *optimizer_, loss);
}

void PipelineStrategy::finish() {
  if (post_) post_->validate();
  if (plan_.is_asynchronous() && options_.steps > 0) engine_->run_to_update();
  losses_to_rank_0_.finish();
}

TrainingState PipelineStrategy::state() {
  if (plan_.is_asynchronous()) {
    throw BadCheckpoint("--checkpoint: --schedule " + setup_.schedule +
                        " has batches in flight between all steps; give a "
                        "schedule that flushes, such as 1f1b");
  }
  if (post_) post_->validate();
  TrainingState state;
  add_whole(state, model_.named_state(), *optimizer_);
  return state;
}

// --- Steps that are validated later ------------------------------------------

// The last rank sends the loss before its step, with the last micro-batch's
// gradient.
StepResult PipelineStrategy::post_validated_step(std::int64_t step) {
  engine_->run([&] {
    const bool stands = post_->validate();
    num_redone_ += stands ? 0 : 1;
    return stands;
  });
  model_.reduce_shared_gradients();
  post_->step();
  StepResult result;
  result.loss = step_loss(step);
  result.grad_norm = std::numeric_limits<double>::quiet_NaN();
  return result;
}

// --- Without a flush ---------------------------------------------------------

StepResult PipelineStrategy::asynchronous_step(std::int64_t step) {
  StepResult result;
  const int stage = plan_.schedule.stage_at(pp_.rank(), 0);
  const int replicas = plan_.schedule.num_replicas(stage);
  result.is_open = (step + 1) % replicas != 0;
  if (result.is_open) return result;
  engine_->run_to_update();
  result.grad_norm = updates_->grad_norm();
  for (std::int64_t k = step - replicas + 1; k < step; ++k) {
    result.open_losses.push_back(step_loss(k));
  }
  result.loss = step_loss(step);
  return result;
}

// --- Losses ------------------------------------------------------------------

// Ranks are at different steps of the run. The last stage's rank sends the loss
// of a step to rank 0 before the gradients that end the step there. Neither
// rank waits: rank 0 receives the loss when its own gradients of the step are
// complete.
void PipelineStrategy::note_loss(int micro_batch, double loss) {
  const auto m = static_cast<int>(plan_.pieces.size());
  const std::int64_t step = first_step_ + micro_batch / m;
  Losses& losses = losses_[step];
  losses.sum += loss;
  if (++losses.count < m || pp_.rank() == 0) return;
  losses_to_rank_0_.forget_arrived();
  losses_to_rank_0_.send(losses.sum, 0, loss_tag(step));
  losses_.erase(step);
}

int PipelineStrategy::loss_rank(std::int64_t step) const {
  const auto m = static_cast<std::int64_t>(plan_.pieces.size());
  const auto b = static_cast<int>(plan_.is_asynchronous() ? step * m : 0);
  return plan_.schedule.place(b, plan_.schedule.num_stages - 1).rank;
}

int PipelineStrategy::loss_tag(std::int64_t step) const {
  // After the tags of all activations and gradients
  const int messages =
      2 * plan_.schedule.total_micro_batches() * plan_.schedule.num_stages;
  return messages + static_cast<int>(step);
}

double PipelineStrategy::step_loss(std::int64_t step) {
  if (pp_.rank() != 0) return 0;
  if (loss_rank(step) == 0) {
    const double loss = losses_.at(step).sum;
    losses_.erase(step);
    return loss;
  }
  return losses_to_rank_0_.receive(loss_rank(step), loss_tag(step));
}

// --- Bills -------------------------------------------------------------------

double PipelineStrategy::predicted_bytes() {
  if (options_.steps == 0) return 0;
  const auto steps = static_cast<double>(options_.steps);
  double losses = 0;
  for (std::int64_t k = 0; k < options_.steps; ++k) {
    if (loss_rank(k) == pp_.rank() && pp_.rank() != 0) losses += 8;
  }
  if (!plan_.is_asynchronous()) {
    double update = model_.predicted_update_bytes();
    if (!post_) return steps * (engine_->predicted_bytes() + update);
    // The norm goes from neighbour to neighbour, the loss to rank 0
    const double ranks = pp_.size();
    update += post_->predicted_bytes() - 2 * (ranks - 1) / ranks * 16;
    // The number of redone steps depends on the data, so it is counted
    return steps * (engine_->predicted_bytes() + update) + losses +
           num_redone_ * engine_->predicted_redo_bytes();
  }
  // Replicas of a stage average their gradients in every update
  double bytes = engine_->predicted_bytes() + losses;
  const int stage = plan_.schedule.stage_at(pp_.rank(), 0);
  const auto replicas = static_cast<double>(
      model_.layout().owners[static_cast<std::size_t>(stage)].size());
  for (const Tensor& each : model_.parameters()) {
    bytes += steps / replicas * 2 * (replicas - 1) / replicas *
             static_cast<double>(each.bytes());
  }
  return bytes;
}

MemoryBill PipelineStrategy::bill() {
  MemoryBill bill = pipeline_bill(options_, model_, *engine_, pp_.rank());
  if (post_ && options_.steps > 0 && pp_.rank() + 1 < pp_.size()) {
    // Copies for undoing a step; the first step has no optimizer state yet
    bill[MemoryKind::kParameter] *= 2;
    if (options_.steps > 1) bill[MemoryKind::kOptimizerState] *= 2;
  }
  return bill;
}

// Not predicted with post-validation (its norm goes from neighbour to
// neighbour), nor without a flush if two ranks send losses between gradients,
// forwards are recomputed while the pipeline drains, or gradients are compared.
double PipelineStrategy::predicted_step_s() {
  const bool is_unusual = pp_.size() == 2 ||
                          engine_options_.recompute != Recompute::kNever ||
                          !setup_.stash;
  if (post_ || (updates_ && is_unusual)) return kNotPredicted;
  return step_s(options_, model_, *engine_);
}

std::string PipelineStrategy::remarks() {
  return staleness_table(
      updates_ ? updates_->uses() : std::vector<VersionUse>{}, pp_);
}

}  // namespace shardbook::pipeline
