#include "chapters/06_1f1b/trainer.h"

#include <algorithm>

#include "chapters/06_1f1b/schedule_memory.h"
#include "core/check.h"

namespace shardbook::pipeline {

Trainer::Trainer(const Options& options, const TrainerOptions& how, Plan plan,
                 ProcessGroup& world)
    : options_(options),
      how_(how),
      plan_(std::move(plan)),
      world_(world),
      data_(Dataset::open(options, plan_.config)),
      feed_(options, data_, plan_.pieces),
      model_(options, plan_.layers, layout_of(plan_.schedule, plan_.cuts),
             world),
      optimizer_(make_optimizer(options.optimizer, model_.parameters(),
                                options.optimizer_options)) {
  // A stage is built from more than it keeps: a whole small model, the second
  // copy of a tied weight. The step is what is measured
  RankContext::current().device.reset_peak_memory();
  if (plan_.is_asynchronous()) {
    updates_.emplace(plan_.schedule, model_, *optimizer_, world.rank(),
                     how.stash);
  }
  engine_.emplace(plan_.schedule, model_, world, feed_,
                  updates_ ? &*updates_ : nullptr);
}

StepResult Trainer::step(std::int64_t step) {
  if (plan_.is_asynchronous()) return asynchronous_step(step);
  feed_.set_first_step(step);
  const double loss = engine_->run();
  model_.reduce_shared_gradients();
  return model_.update(options_, *optimizer_, loss);
}

void Trainer::finish() {
  if (!plan_.is_asynchronous() || options_.steps == 0) return;
  engine_->run_to_update();
  for (Sent& each : sent_) each.work.wait();
  sent_.clear();
}

// --- Without a flush -------------------------------------------------------------

int Trainer::loss_rank(std::int64_t step) const {
  const auto m = static_cast<std::int64_t>(plan_.pieces.size());
  return plan_.schedule
      .place(static_cast<int>(step * m), plan_.schedule.num_stages - 1)
      .rank;
}

int Trainer::loss_tag(std::int64_t step) const {
  // Behind the tags of all activations and gradients
  const int messages =
      2 * plan_.schedule.num_micro_batches * plan_.schedule.num_stages;
  return messages + static_cast<int>(step);
}

double Trainer::step_loss(std::int64_t step) const {
  const auto m = static_cast<int>(plan_.pieces.size());
  double loss = 0;
  for (int i = 0; i < m; ++i) {
    loss += engine_->loss(static_cast<int>(step) * m + i);
  }
  return loss;
}

// Ranks are at different places of the run: the loss of a step goes from where
// it is made to rank 0, ahead of the gradients that end the step there. Nobody
// waits for it.
StepResult Trainer::asynchronous_step(std::int64_t step) {
  engine_->run_to_update();
  const auto replicas = static_cast<std::int64_t>(
      plan_.schedule.route_of.empty()
          ? 1
          : model_.layout()
                .owners[static_cast<std::size_t>(plan_.schedule.num_stages - 1)]
                .size());
  // A replica of the last stage has every replicas-th loss
  StepResult result;
  result.grad_norm = updates_->grad_norm();
  const MemoryScope kind(MemoryKind::kCommunication);
  while (next_loss_ < std::min(options_.steps, (step + 1) * replicas)) {
    const std::int64_t k = next_loss_++;
    if (loss_rank(k) != world_.rank() || world_.rank() == 0) continue;
    Sent sent;
    sent.value = Tensor::full({}, step_loss(k), {DType::kF64, Device()});
    sent.work = world_.send(sent.value, 0, loss_tag(k), "loss");
    sent_.push_back(std::move(sent));
  }
  if (world_.rank() != 0) return result;
  if (loss_rank(step) == 0) {
    result.loss = step_loss(step);
  } else {
    const Tensor loss = Tensor::empty({}, {DType::kF64, Device()});
    world_.recv(loss, loss_rank(step), loss_tag(step), "loss").wait();
    result.loss = loss.item();
  }
  return result;
}

const std::vector<VersionUse>& Trainer::version_uses() const {
  static const std::vector<VersionUse> kNone;
  return updates_ ? updates_->uses() : kNone;
}

// --- Bills -----------------------------------------------------------------------

double Trainer::predicted_bytes() {
  if (options_.steps == 0) return 0;
  const auto steps = static_cast<double>(options_.steps);
  if (!plan_.is_asynchronous()) {
    return steps *
           (engine_->predicted_bytes() + model_.predicted_update_bytes());
  }
  double bytes = engine_->predicted_bytes();
  for (std::int64_t k = 0; k < options_.steps; ++k) {
    if (loss_rank(k) == world_.rank() && world_.rank() != 0) bytes += 8;
  }
  // Replicas of a stage average their gradients, each time
  const int stage = plan_.schedule.stage_at(world_.rank(), 0);
  const auto replicas = static_cast<double>(
      model_.layout().owners[static_cast<std::size_t>(stage)].size());
  for (const Tensor& each : model_.parameters()) {
    bytes += steps / replicas * 2 * (replicas - 1) / replicas *
             static_cast<double>(each.bytes());
  }
  return bytes;
}

MemoryBill Trainer::bill() {
  MemoryBill bill = schedule_bill(options_, plan_.schedule, world_.rank(),
                                  model_, feed_);
  if (!how_.stash) {
    // The lab computes every gradient once more, to see how wrong it is
    bill[MemoryKind::kActivation] = bill[MemoryKind::kGradient] = -1;
  }
  return bill;
}

// --- The whole model ---------------------------------------------------------------

std::vector<NamedTensor> Trainer::full_parameters() {
  return model_.full_parameters();
}

LoadedModel Trainer::whole_model(
    const std::vector<NamedTensor>& values) const {
  Options fresh = options_;
  fresh.load.clear();
  LoadedModel loaded = build_model(fresh);
  loaded.model->load_values(values);
  return loaded;
}

}  // namespace shardbook::pipeline
