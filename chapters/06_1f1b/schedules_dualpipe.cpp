// The bidirectional schedule.

#include <algorithm>

#include "chapters/06_1f1b/schedules.h"
#include "chapters/common/pipeline/schedule.h"
#include "core/check.h"
#include "core/how_many.h"

namespace shardbook::pipeline::schedules {

using namespace parts;

namespace {

/// One rank's list. Phase 0 is the direction whose micro-batches reach this
/// rank first: from rank 0 for the first half of the ranks, from rank p-1 for
/// the second.
class DualPipeRank {
 public:
  DualPipeRank(int rank, int p, int m)
      : half_(p / 2),
        from_end_(std::min(rank, p - 1 - rank)),
        is_second_half_(rank >= p / 2),
        half_micro_batches_(m / 2) {}

  Actions list() {
    const int h = from_end_, towards_middle = half_ - h - 1;
    // 1. Forwards of phase 0
    for (int i = 0; i < 2 * towards_middle; ++i) forward_of(0);
    // 2. Forwards of both phases
    for (int i = 0; i < h + 1; ++i) {
      forward_of(0);
      forward_of(1);
    }
    // 3. Backwards of phase 1, split to send the input's gradient early
    for (int i = 0; i < towards_middle; ++i) {
      backward_of(1, /*is_split=*/true);
      weight();
      forward_of(1);
    }
    // 4. Steady state: forwards of one phase with backwards of the other
    for (int i = 0; i < half_micro_batches_ - 2 * half_ + h + 1; ++i) {
      // The two middle ranks wait less if their first pair does not overlap
      pair(0, 1, /*overlaps=*/i > 0 || towards_middle > 0);
      pair(1, 0);
    }
    // 5. Phase 0 has no forwards left
    for (int i = 0; i < towards_middle; ++i) {
      backward_of(1);
      pair(1, 0);
    }
    drain(h, towards_middle);
    return list_;
  }

 private:
  void drain(int h, int towards_middle) {
    // 6. Backwards of both phases; the second half of them is split
    for (int i = 0; i < h + 1; ++i) {
      const int switch_at = (h + 1) / 2;
      backward_of(1, h % 2 == 1 ? i >= switch_at : i > switch_at);
      backward_of(0, i >= switch_at);
    }
    // 7. Gradients of weights fill the time between backwards
    for (int i = 0; i < towards_middle; ++i) {
      weight();
      backward_of(0, /*is_split=*/true);
    }
    // 8. The remaining gradients of weights
    for (int i = 0; i < h + 1; ++i) weight();
  }

  int way(int phase) const { return is_second_half_ ? 1 - phase : phase; }

  Action next(ActionKind kind, int phase, int* count) {
    const int w = way(phase);
    return {kind, w * half_micro_batches_ + (*count)++, w, false};
  }
  void forward_of(int phase) {
    list_.push_back(next(ActionKind::kForward, phase, &forwards_[phase]));
  }
  void backward_of(int phase, bool is_split = false) {
    list_.push_back(
        next(is_split ? ActionKind::kBackwardInput : ActionKind::kBackward,
             phase, &backwards_[phase]));
    if (is_split) waiting_.push_back(list_.back());
  }
  void pair(int forward_phase, int backward_phase, bool overlaps = true) {
    forward_of(forward_phase);
    list_.back().overlaps_next = overlaps;
    backward_of(backward_phase);
  }
  void weight() {
    list_.push_back(
        backward_weight(waiting_.front().micro_batch, waiting_.front().chunk));
    waiting_.erase(waiting_.begin());
  }

  int half_, from_end_;
  bool is_second_half_;
  int half_micro_batches_;
  int forwards_[2] = {0, 0}, backwards_[2] = {0, 0};
  Actions list_, waiting_;
};

}  // namespace

Schedule dualpipe(int num_ranks, int micro_batches) {
  const int p = num_ranks, m = micro_batches;
  SB_CHECK(p >= 2 && p % 2 == 0, "--schedule dualpipe: ", how_many(p, "rank"),
           "; give an even number");
  SB_CHECK(m % 2 == 0 && m >= 2 * p,
           "--schedule dualpipe: ", how_many(m, "micro-batch"), " on ",
           how_many(p, "rank"), "; give an even number, at least ", 2 * p);
  Schedule schedule = empty("dualpipe", p, m);
  Route back;
  for (int stage = 0; stage < p; ++stage) back.push_back({p - 1 - stage, 1});
  schedule.routes.push_back(back);
  for (int b = m / 2; b < m; ++b) schedule.route_of[at(b)] = 1;
  for (int rank = 0; rank < p; ++rank) {
    schedule.actions[at(rank)] = DualPipeRank(rank, p, m).list();
  }
  return schedule;
}

}  // namespace shardbook::pipeline::schedules
