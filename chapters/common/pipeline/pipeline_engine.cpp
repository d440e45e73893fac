#include "chapters/common/pipeline/pipeline_engine.h"

#include <algorithm>

#include "chapters/common/pipeline/schedule_check.h"
#include "chapters/common/run/training.h"
#include "core/autograd.h"
#include "core/check.h"
#include "core/how_many.h"
#include "core/layers.h"
#include "core/ops.h"
#include "core/tensor_storage.h"
#include "sim/virtual_clock.h"

namespace shardbook::pipeline {

PipelineLayout layout_of(const Schedule& schedule,
                         const std::vector<int>& cuts) {
  PipelineLayout layout;
  layout.cuts = cuts;
  for (int stage = 0; stage < schedule.num_stages; ++stage) {
    layout.owners.push_back(schedule.owners(stage));
  }
  return layout;
}

namespace {

/// Returns the schedule if it is sound and made for these ranks.
Schedule checked(Schedule schedule, const ProcessGroup& world) {
  check(schedule);
  SB_CHECK(schedule.num_ranks == world.size(), "schedule '", schedule.name,
           "': made for ", how_many(schedule.num_ranks, "rank"), "; there are ",
           world.size());
  return schedule;
}

}  // namespace

Engine::Engine(Schedule schedule, PipelineModel& model, ProcessGroup& world,
               Feed& feed, WeightVersions* versions,
               const EngineOptions& options)
    : schedule_(checked(std::move(schedule), world)),
      model_(model),
      world_(world),
      feed_(feed),
      versions_(versions),
      options_(options),
      recomputed_(schedule_, world.rank(), options.recompute),
      mailbox_(world, schedule_.num_stages),
      walk_(schedule_, world.rank()) {
  SB_CHECK(schedule_.num_stages == model.layout().num_stages(), "schedule '",
           schedule_.name, "': has ", how_many(schedule_.num_stages, "stage"),
           "; the model is cut into ", model.layout().num_stages());
  SB_CHECK(
      schedule_.flushes || versions_ != nullptr, "schedule '", schedule_.name,
      "': updates the weights before its end; give the engine WeightVersions");
  stages_ = schedule_.stages(world.rank());
  later_.resize(stages_.size());
  check_skips();
  // All micro-batches together update running statistics once
  for (const int stage : stages_) {
    if (schedule_.flushes) defer_batch_norms(model_.stage(stage));
  }
}

void Engine::check_skips() {
  for (SkipRoute& route : skip_routes(model_.layers(), model_.layout().cuts)) {
    skips_[route.name] = route;
  }
  if (skips_.empty()) return;
  for (int rank = 0; rank < schedule_.num_ranks; ++rank) {
    SB_CHECK(schedule_.num_chunks(rank) == 1, "skip '", skips_.begin()->first,
             "': rank ", rank, " has several stages in schedule '",
             schedule_.name, "'; skips travel between ranks with one stage");
  }
}

double Engine::run(const std::function<bool()>& stands) {
  check_not_failed();
  is_running_ = true;
  losses_.clear();
  num_left_out_ = 0;
  walk_ = ActionWalk(schedule_, world_.rank());
  const int head = num_first_forwards(world_.rank());
  for (int i = 0; i < head; ++i) perform(walk_.next());
  if (stands && !stands()) redo_first_forwards();
  const Steady steady = may_leave_out() ? steady_state(schedule_) : Steady();
  sim::SteadyState watched(world_);
  while (!walk_.is_at_end()) {
    perform(walk_.next());
    leave_out_repetitions(steady, watched);
  }
  // Flush: no message is in flight when the update begins
  mailbox_.flush();
  for (const int stage : stages_) {
    if (schedule_.flushes && options_.commits_statistics) {
      commit_batch_norms(model_.stage(stage));
    }
  }
  is_running_ = false;
  return sum_of_losses();
}

double Engine::evaluate() {
  check_not_failed();
  SB_CHECK(schedule_.flushes, "schedule '", schedule_.name,
           "': evaluate between updates, which the list has; give a schedule "
           "that flushes");
  is_running_ = true;
  losses_.clear();
  const NoGrad no_grad;
  walk_ = ActionWalk(schedule_, world_.rank());
  while (!walk_.is_at_end()) {
    const Action action = walk_.next();
    if (action.kind != ActionKind::kForward) continue;
    forward(action.micro_batch, stages_[at(action.chunk)]);
  }
  runs_.clear();
  mailbox_.flush();
  is_running_ = false;
  return sum_of_losses();
}

double Engine::sum_of_losses() {
  double sum = 0;
  for (const auto& each : losses_) sum += loss(each.first);
  return sum;
}

void Engine::check_not_failed() const {
  SB_CHECK(!is_running_, "schedule '", schedule_.name,
           "': a run after a run that failed: gradients, graphs and messages "
           "of that one are left; start the ranks again");
}

// --- The list ----------------------------------------------------------------

namespace {

// The name of an action in the timeline: "micro-batch 3, stage 5".
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
  const auto chunk = at(action.chunk);
  const int stage = stages_[chunk];
  const sim::ActivityScope activity(
      activity_name(action, stages_.size() > 1 ? stage : -1));
  // The letters of a list
  switch (action.kind) {
    case ActionKind::kForward:
      forward(b, stage);
      note_kept_activations();
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

bool Engine::adds_last_gradients() const {
  const auto& list = schedule_.actions[at(world_.rank())];
  const auto now = list.begin() + walk_.position() - 1;
  return std::none_of(now + 1, list.end(), [&](const Action& later) {
    return later.kind == now->kind && later.chunk == now->chunk;
  });
}

// --- One micro-batch ---------------------------------------------------------

void Engine::forward(int b, int stage) {
  Live live;
  live.inputs = receive_inputs(b, stage);
  set_random_state(b, stage);
  live.random = RankContext::current().random;
  if (versions_ != nullptr) versions_->before_forward(b);
  live.is_dropped = recomputed_.contains(schedule_.listed(b),
                                         schedule_.place(b, stage).chunk);
  Tensors outputs;
  if (live.is_dropped) {
    // Keep only the inputs
    const NoGrad no_grad;
    outputs = function(b, stage)(live.inputs);
  } else {
    // Keep the graph; backward does not need the outputs
    live.run = run_forward(function(b, stage), live.inputs, spec(b, stage));
    live.inputs.clear();
    outputs = std::exchange(live.run.outputs, {});
  }
  if (is_last(stage)) {
    note_loss(outputs[0], b);
  } else {
    send_outputs(outputs, b, stage);
  }
  RankContext::current().random.batch = BatchSlice{};
  runs_.emplace(std::make_pair(b, stage), std::move(live));
}

void Engine::backward(int b, int stage) {
  const auto found = runs_.find({b, stage});
  SB_CHECK(found != runs_.end(), "schedule '", schedule_.name, "': B", b,
           " of stage ", stage, " has no forward");
  Live live = std::move(found->second);
  runs_.erase(found);
  if (is_last(stage) && on_loss_) {
    on_loss_(b, loss(b));
    if (!schedule_.flushes) losses_.erase(b);
  }
  // Recompute the graph before its gradient arrives
  if (live.is_dropped && options_.early_recompute) recompute(live, b, stage);
  Tensors grad_outputs = receive_gradients(b, stage);
  if (live.is_dropped && !options_.early_recompute) recompute(live, b, stage);
  // Read the weights that the forward read
  if (versions_ != nullptr) {
    versions_->before_backward(b, live.run, grad_outputs);
  }
  const Tensors grads =
      run_backward(std::move(live.run), std::move(grad_outputs));
  if (versions_ != nullptr) versions_->after_backward(b);
  if (stage > 0) send_gradients(grads, b, stage);
}

void Engine::recompute(Live& live, int b, int stage) {
  if (versions_ != nullptr) versions_->before_recompute(b);
  live.run = run_forward_again(function(b, stage), live.inputs, spec(b, stage),
                               live.random);
  live.inputs.clear();
  live.run.outputs.clear();
}

// The stage's layers, and on the last stage also the loss, so that no
// micro-batch keeps its logits, which are larger than all other activations.
StageFunction Engine::function(int b, int stage) {
  return [this, b, stage](const Tensors& inputs) {
    Tensors outputs = model_.stage(stage)(inputs);
    return is_last(stage) ? Tensors{feed_.loss(b, outputs)} : outputs;
  };
}

// Dropout is drawn as on one device: for these rows of the batch, after the
// random operations of the previous stages.
void Engine::set_random_state(int b, int stage) {
  const Piece piece = feed_.piece(b);
  RandomState& random = RankContext::current().random;
  random.step = piece.step;
  random.batch = piece.slice;
  random.next_op = spec(b, stage).first_random_op;
}

void Engine::note_loss(const Tensor& value, int b) {
  loss_options_ = value.options();
  Loss& loss = losses_[b] = Loss{};
  loss.share = feed_.piece(b).share;
  if (options_.reads_losses_late) {
    loss.value = value.detach();
    set_memory_kind(loss.value, MemoryKind::kCommunication);
  } else {
    loss.read = value.item();
  }
}

double Engine::loss(int micro_batch) {
  Loss& loss = losses_.at(micro_batch);
  if (loss.value.defined()) {
    loss.read = loss.value.item();
    loss.value = Tensor();
  }
  return loss.read * loss.share;
}

// --- Messages: values to the next stage, skips directly to theirs ------------

Tensors Engine::receive_inputs(int b, int stage) {
  if (stage == 0) return feed_.inputs(b);
  Tensors inputs =
      mailbox_.receive_forward(spec(b, stage), b, stage, rank_of(b, stage - 1));
  for (const std::string& name : model_.stage(stage).incoming()) {
    const int from = skips_.at(name).from_stage;
    inputs.push_back(mailbox_.receive_forward(skip_spec(name, b, stage), b,
                                              stage, rank_of(b, from))[0]);
  }
  return inputs;
}

void Engine::send_outputs(const Tensors& outputs, int b, int stage) {
  const auto& skips = model_.stage(stage).outgoing();
  const auto skips_begin =
      outputs.end() - static_cast<std::ptrdiff_t>(skips.size());
  mailbox_.send_forward({outputs.begin(), skips_begin}, b, stage + 1,
                        rank_of(b, stage + 1));
  // Send skips past the stages in between
  for (std::size_t i = 0; i < skips.size(); ++i) {
    const int to = skips_.at(skips[i]).to_stage;
    mailbox_.send_forward({skips_begin[static_cast<std::ptrdiff_t>(i)]}, b, to,
                          rank_of(b, to));
  }
}

Tensors Engine::receive_gradients(int b, int stage) {
  if (is_last(stage)) {
    // The share of these rows in the mean over the batch
    return {Tensor::full({}, feed_.piece(b).share * feed_.loss_scale(),
                         loss_options_)};
  }
  Tensors grads = mailbox_.receive_backward(spec(b, stage + 1), b, stage + 1,
                                            rank_of(b, stage + 1));
  for (const std::string& name : model_.stage(stage).outgoing()) {
    const int from = skips_.at(name).to_stage;
    grads.push_back(mailbox_.receive_backward(skip_spec(name, b, stage + 1), b,
                                              from, rank_of(b, from))[0]);
  }
  return grads;
}

void Engine::send_gradients(const Tensors& grads, int b, int stage) {
  const auto& skips = model_.stage(stage).incoming();
  const auto skips_begin =
      grads.end() - static_cast<std::ptrdiff_t>(skips.size());
  mailbox_.send_backward({grads.begin(), skips_begin}, spec(b, stage), b, stage,
                         rank_of(b, stage - 1));
  for (std::size_t i = 0; i < skips.size(); ++i) {
    mailbox_.send_backward({skips_begin[static_cast<std::ptrdiff_t>(i)]},
                           skip_spec(skips[i], b, stage), b, stage,
                           rank_of(b, skips_.at(skips[i]).from_stage));
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
  return specs[at(model_.layout().begin(stage))];
}

LayerInput Engine::skip_spec(const std::string& name, int b, int stage) {
  LayerInput only;
  only.values = {spec(b, stage).skips.at(name)};
  return only;
}

bool Engine::is_here(int b, int stage) const {
  return rank_of(b, stage) == world_.rank();
}

}  // namespace shardbook::pipeline
