#include "chapters/common/pipeline/engine.h"

#include <algorithm>

#include "chapters/common/pipeline/check.h"
#include "core/check.h"
#include "sim/virtual_clock.h"

namespace shardbook::pipeline {

PipelineLayout layout_of(const Schedule& schedule,
                         const std::vector<int>& cuts) {
  PipelineLayout layout;
  layout.cuts = cuts;
  for (int stage = 0; stage < schedule.num_stages; ++stage) {
    std::vector<int> owners;
    for (const Route& route : schedule.routes) {
      const int rank = route[static_cast<std::size_t>(stage)].rank;
      if (std::find(owners.begin(), owners.end(), rank) == owners.end()) {
        owners.push_back(rank);
      }
    }
    layout.owners.push_back(owners);
  }
  return layout;
}

namespace {

/// Returns the schedule if it is sound and made for these ranks.
Schedule checked(Schedule schedule, const ProcessGroup& world) {
  check(schedule);
  SB_CHECK(schedule.num_ranks == world.size(), "schedule '", schedule.name,
           "': made for ", schedule.num_ranks, " ranks; there are ",
           world.size());
  return schedule;
}

}  // namespace

Engine::Engine(Schedule schedule, PipelineModel& model, ProcessGroup& world,
               Feed& feed, WeightVersions* versions)
    : schedule_(checked(std::move(schedule), world)),
      model_(model),
      world_(world),
      feed_(feed),
      versions_(versions),
      mailbox_(world, schedule_.num_stages),
      walk_(schedule_, world.rank()) {
  SB_CHECK(schedule_.num_stages == model.layout().num_stages(), "schedule '",
           schedule_.name, "': has ", schedule_.num_stages,
           " stages; the model is cut into ", model.layout().num_stages());
  SB_CHECK(schedule_.flushes || versions_ != nullptr, "schedule '",
           schedule_.name,
           "': updates come in between; give the engine somebody who makes "
           "them");
  const int chunks = schedule_.num_chunks(world.rank());
  for (int chunk = 0; chunk < chunks; ++chunk) {
    stages_.push_back(schedule_.stage_at(world.rank(), chunk));
  }
  later_.resize(stages_.size());
}

double Engine::run() {
  return run([] { return true; });
}

double Engine::run(const std::function<bool()>& stands) {
  losses_.clear();
  walk_ = Walk(schedule_, world_.rank());
  const int head = num_first_forwards(world_.rank());
  for (int i = 0; i < head; ++i) perform(walk_.next());
  if (!stands()) redo_first_forwards();
  while (!walk_.is_at_end()) perform(walk_.next());
  mailbox_.flush();
  double loss = 0;
  for (const auto& [micro_batch, share] : losses_) loss += share;
  return loss;
}

bool Engine::run_to_update() {
  while (!walk_.is_at_end()) {
    const Action action = walk_.next();
    perform(action);
    if (action.kind == ActionKind::kUpdate) return true;
  }
  mailbox_.flush();
  return false;
}

// --- Forwards on weights that do not stand -----------------------------------

int Engine::num_first_forwards(int rank) const {
  const auto& actions = schedule_.actions[static_cast<std::size_t>(rank)];
  const auto other = std::find_if(
      actions.begin(), actions.end(),
      [](const Action& each) { return each.kind != ActionKind::kForward; });
  return static_cast<int>(other - actions.begin());
}

void Engine::redo_first_forwards() {
  SB_CHECK(stages_.size() == 1, "schedule '", schedule_.name, "': rank ",
           world_.rank(),
           " has several stages; updates before validation are "
           "for ranks with one");
  runs_.clear();
  live_ = 0;
  const int stage = stages_[0], rank = world_.rank();
  const int mine = num_first_forwards(rank);
  // The stage before has sent more than this one has taken
  if (stage > 0) {
    const int from = rank_of(0, stage - 1);
    for (int b = mine; b < num_first_forwards(from); ++b) {
      mailbox_.receive_forward(spec(b, stage), b, stage, from);
    }
  }
  walk_ = Walk(schedule_, rank);
  for (int i = 0; i < mine; ++i) perform(walk_.next());
}

double Engine::predicted_redo_bytes() {
  double bytes = 0;
  const int stage = stages_[0];
  for (int b = 0; b < num_first_forwards(world_.rank()); ++b) {
    if (!is_last(stage) && rank_of(b, stage + 1) != world_.rank()) {
      bytes += forward_bytes(spec(b, stage + 1));
    }
  }
  return bytes;
}

// --- The list ----------------------------------------------------------------

namespace {

// What the timeline says of an action: "micro-batch 3, stage 5".
std::string activity_name(const Action& action, int stage) {
  if (action.kind == ActionKind::kUpdate) return "update";
  std::string name = "micro-batch " + std::to_string(action.micro_batch);
  if (stage >= 0) name += ", stage " + std::to_string(stage);
  const bool weights = action.kind == ActionKind::kBackwardWeight;
  return weights ? "weights of " + name : name;
}

}  // namespace

void Engine::perform(const Action& action) {
  const int b = action.micro_batch;
  const auto chunk = static_cast<std::size_t>(action.chunk);
  const int stage = stages_[chunk];
  const sim::ActivityScope activity(
      activity_name(action, stages_.size() > 1 ? stage : -1));
  // The letters of a list
  switch (action.kind) {
    case ActionKind::kForward:
      forward(b, stage);
      max_live_ = std::max(max_live_, ++live_);
      break;
    case ActionKind::kBackward:
      backward(b, stage);
      --live_;
      break;
    case ActionKind::kBackwardInput:
      backward_input(b, stage, later_[chunk]);
      break;
    case ActionKind::kBackwardWeight:
      later_[chunk].pop();
      --live_;
      break;
    case ActionKind::kUpdate:
      versions_->update(b);
      break;
  }
}

void Engine::forward(int b, int stage) {
  const LayerInput& takes = spec(b, stage);
  const Tensors received =
      stage == 0
          ? feed_.inputs(b)
          : mailbox_.receive_forward(takes, b, stage, rank_of(b, stage - 1));
  // Dropout is drawn as on one device: at this place of the batch, after the
  // random operations of the stages before
  const Piece piece = feed_.piece(b);
  RandomState& random = RankContext::current().random;
  random.step = piece.step;
  random.batch = piece.slice;
  random.next_op = takes.first_random_op;

  if (versions_ != nullptr) versions_->before_forward(b);
  const auto compute = [&](const Tensors& inputs) {
    Tensors outputs = model_.stage(stage)(inputs);
    return is_last(stage) ? Tensors{feed_.loss(b, outputs)} : outputs;
  };
  StageRun run = run_forward(compute, received, takes);
  if (is_last(stage)) {
    loss_options_ = run.outputs[0].options();
    losses_[b] = run.outputs[0].item() * piece.share;
  } else {
    mailbox_.send_forward(run.outputs, b, stage + 1, rank_of(b, stage + 1));
  }
  run.outputs.clear();  // backward begins from their gradients alone
  random.batch = BatchSlice{};
  runs_.emplace(std::make_pair(b, stage), std::move(run));
}

void Engine::backward(int b, int stage) {
  const auto found = runs_.find({b, stage});
  SB_CHECK(found != runs_.end(), "schedule '", schedule_.name, "': B", b,
           " of stage ", stage, " has no forward");
  StageRun run = std::move(found->second);
  runs_.erase(found);
  if (is_last(stage) && on_loss_) {
    on_loss_(b, losses_.at(b));
    if (!schedule_.flushes) losses_.erase(b);
  }
  Tensors grad_outputs =
      is_last(stage)
          ? Tensors{Tensor::full({}, feed_.piece(b).share, loss_options_)}
          : mailbox_.receive_backward(spec(b, stage + 1), b, stage + 1,
                                      rank_of(b, stage + 1));
  if (versions_ != nullptr) versions_->before_backward(b, run, grad_outputs);
  const Tensors grads = run_backward(std::move(run), std::move(grad_outputs));
  if (versions_ != nullptr) versions_->after_backward(b);
  if (stage > 0) {
    mailbox_.send_backward(grads, spec(b, stage), b, stage,
                           rank_of(b, stage - 1));
  }
}

void Engine::backward_input(int b, int stage, WeightGradients& later) {
  const DeferWeightGradients scope(later);
  backward(b, stage);
  later.flush();
}

const LayerInput& Engine::spec(int micro_batch, int stage) {
  const std::int64_t rows = feed_.piece(micro_batch).rows;
  auto& specs = specs_[rows];
  if (specs.empty()) {
    specs = trace_shapes(model_.layers(), feed_.example(rows), feed_.dtype());
  }
  const int layer = model_.layout().cuts[static_cast<std::size_t>(stage)];
  return specs[static_cast<std::size_t>(layer)];
}

// m forward and m backward messages at each end of a stage, but for the ends of
// the pipeline, and for neighbours on the same rank.
double Engine::predicted_bytes() {
  const int listed = schedule_.num_micro_batches;
  return sent_bytes(0, listed) +
         schedule_.repeats * sent_bytes(listed - schedule_.period, listed);
}

double Engine::sent_bytes(int first, int last) {
  double bytes = 0;
  for (int b = first; b < last; ++b) {
    for (int stage = 0; stage < schedule_.num_stages; ++stage) {
      if (rank_of(b, stage) != world_.rank()) continue;
      if (!is_last(stage) && rank_of(b, stage + 1) != world_.rank()) {
        bytes += forward_bytes(spec(b, stage + 1));
      }
      if (stage > 0 && rank_of(b, stage - 1) != world_.rank()) {
        bytes += backward_bytes(spec(b, stage));
      }
    }
  }
  return bytes;
}

}  // namespace shardbook::pipeline
