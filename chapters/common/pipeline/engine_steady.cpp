// Long runs on shapes: micro-batches that repeat are left out.

#include <algorithm>

#include "chapters/common/pipeline/engine.h"

namespace shardbook::pipeline {

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
  const Schedule::Part& part =
      steady.first[static_cast<std::size_t>(world_.rank())];
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
