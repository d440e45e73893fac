// Runs other than the plain step: up to an update, forwards again after an
// invalid one, forwards alone, and long runs on shapes.

#include <algorithm>

#include "chapters/common/pipeline/pipeline_engine.h"
#include "core/check.h"
#include "core/ops.h"

namespace shardbook::pipeline {

bool Engine::run_to_update() {
  check_not_failed();
  is_running_ = true;
  bool has_updated = false;
  while (!walk_.is_at_end() && !has_updated) {
    const Action action = walk_.next();
    perform(action);
    has_updated = action.kind == ActionKind::kUpdate;
  }
  if (!has_updated) mailbox_.flush();
  is_running_ = false;
  return has_updated;
}

// --- Forwards on weights of an invalid update --------------------------------

int Engine::num_first_forwards(int rank) const {
  const auto& actions = schedule_.actions[at(rank)];
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
  SB_CHECK(skips_.empty(), "schedule '", schedule_.name,
           "': forwards with skips cannot be done again");
  runs_.clear();
  live_ = 0;
  const int stage = stages_[0], rank = world_.rank();
  const int mine = num_first_forwards(rank);
  // The previous stage has sent more than this one has received
  if (stage > 0) {
    const int from = rank_of(0, stage - 1);
    for (int b = mine; b < num_first_forwards(from); ++b) {
      mailbox_.receive_forward(spec(b, stage), b, stage, from);
    }
  }
  walk_ = ActionWalk(schedule_, rank);
  for (int i = 0; i < mine; ++i) perform(walk_.next());
}

// --- Micro-batches that repeat are left out ----------------------------------

// Micro-batches must be equal, and the engine must not keep anything for each of
// them. A picture of a short run shows all of it. Collective for long runs.
bool Engine::may_leave_out() {
  constexpr int kFewest = 128;
  const int m = schedule_.num_micro_batches;
  if (m < kFewest || !options_.leaves_out_repetitions ||
      !sim::SteadyState(world_).may_skip_messages()) {
    return false;
  }
  bool is_even = schedule_.flushes && skips_.empty() && !on_loss_ &&
                 !options_.reads_losses_late;
  for (std::size_t chunk = 0; chunk < stages_.size(); ++chunk) {
    const int index = static_cast<int>(chunk);
    is_even = is_even && model_.stage(stages_[chunk]).buffers().empty();
    for (int b = 0; b < m; ++b) {
      is_even =
          is_even && feed_.piece(b).rows == feed_.piece(0).rows &&
          recomputed_.contains(b, index) == recomputed_.contains(0, index);
    }
  }
  const auto answers = world_.exchange(is_even ? "yes" : "no");
  return std::all_of(answers.begin(), answers.end(),
                     [](const auto& each) { return each == "yes"; });
}

// Between two repetitions, ranks compare times. The last repetition runs.
void Engine::leave_out_repetitions(const Steady& steady,
                                   sim::SteadyState& watched) {
  if (steady.count == 0 || num_left_out_ > 0) return;
  const Schedule::Part& part = steady.first[at(world_.rank())];
  const int length = part.end - part.begin;
  const int done = walk_.position() - part.begin;
  const int left = steady.count - done / length - 1;
  if (done <= 0 || done % length != 0 || left <= 0) return;
  const int settled = watched.num_settled();
  if (settled == 0 || settled > left) return;
  const int skipped = left - left % settled;
  watched.skip(skipped);
  num_left_out_ = skipped * steady.period;
  walk_.leave_out(skipped * length, num_left_out_);
}

}  // namespace shardbook::pipeline
