#include "chapters/common/pipeline/replay.h"

#include <algorithm>

#include "chapters/common/pipeline/at.h"
#include "chapters/common/pipeline/check.h"
#include "chapters/common/pipeline/dependencies.h"
#include "core/check.h"

namespace shardbook::pipeline {
namespace {

double duration(const Costs& costs, ActionKind kind) {
  switch (kind) {
    case ActionKind::kForward:
      return costs.forward;
    case ActionKind::kBackward:
      return costs.backward;
    case ActionKind::kBackwardInput:
      return costs.backward_input;
    case ActionKind::kBackwardWeight:
      return costs.backward_weight;
    case ActionKind::kUpdate:
      return costs.update;
  }
  return 0;
}

class Player {
 public:
  Player(const Schedule& schedule, const std::vector<Costs>& costs)
      : schedule_(schedule), costs_(costs), dependencies_(schedule) {}

  std::vector<std::vector<Span>> run() {
    const int ranks = schedule_.num_ranks;
    spans_.resize(at(ranks));
    // In a sound schedule some rank can always continue
    for (bool is_moving = true; is_moving;) {
      is_moving = false;
      for (int rank = 0; rank < ranks; ++rank) {
        while (step(rank)) is_moving = true;
      }
    }
    return spans_;
  }

 private:
  const Costs& costs(int rank, int chunk) const {
    return costs_[at(dependencies_.stage(rank, chunk))];
  }

  /// The time at which all inputs of an action have arrived; false if unknown.
  bool arrival(int rank, int index, double* time) const {
    for (const ActionPlace& each : dependencies_.of(rank, index)) {
      const auto& done = spans_[at(each.rank)];
      if (at(each.index) >= done.size()) return false;
      const double on_the_way =
          each.rank == rank ? 0
                            : costs(each.rank, each.action.chunk).communication;
      *time = std::max(*time, done[at(each.index)].end + on_the_way);
    }
    return true;
  }

  bool step(int rank) {
    const auto& list = schedule_.actions[at(rank)];
    auto& done = spans_[at(rank)];
    if (done.size() == list.size()) return false;
    const int first = static_cast<int>(done.size());
    const Action& a = list[at(first)];
    double begin = done.empty() ? 0 : done.back().end;
    if (!arrival(rank, first, &begin)) return false;
    const Costs& own = costs(rank, a.chunk);
    double length = duration(own, a.kind);
    if (a.overlaps_next) {
      const Action& b = list[at(first) + 1];
      if (!arrival(rank, first + 1, &begin)) return false;
      const Costs& other = costs(rank, b.chunk);
      const double pair = std::max(own.overlapped_pair, other.overlapped_pair);
      length = pair < 0 ? length + duration(other, b.kind) : pair;
      done.push_back({begin, begin + length});
    }
    done.push_back({begin, begin + length});
    return true;
  }

  const Schedule& schedule_;
  const std::vector<Costs>& costs_;
  Dependencies dependencies_;
  std::vector<std::vector<Span>> spans_;
};

}  // namespace

Replay replay_of(const Schedule& schedule,
                 std::vector<std::vector<Span>> spans) {
  Replay result;
  result.spans = std::move(spans);
  for (std::size_t rank = 0; rank < result.spans.size(); ++rank) {
    const auto& list = schedule.actions[rank];
    double busy = 0;
    for (std::size_t i = 0; i < list.size(); ++i) {
      const Span& span = result.spans[rank][i];
      if (!list[i].overlaps_next) busy += span.end - span.begin;
    }
    const auto& own = result.spans[rank];  // empty if no route uses the rank
    const double end = own.empty() ? 0 : own.back().end;
    result.busy.push_back(busy);
    result.window.push_back(own.empty() ? 0 : end - own.front().begin);
    result.makespan = std::max(result.makespan, end);
  }
  return result;
}

Replay replay(const Schedule& schedule, const std::vector<Costs>& costs) {
  check(schedule);
  SB_CHECK(costs.size() == at(schedule.num_stages), "schedule '", schedule.name,
           "': costs of ", costs.size(), " stages; give ", schedule.num_stages);
  return replay_of(schedule, Player(schedule, costs).run());
}

Replay replay(const Schedule& schedule, const Costs& costs) {
  const int stages = std::max(schedule.num_stages, 0);
  return replay(schedule, std::vector<Costs>(at(stages), costs));
}

double idle_share(const Replay& replay) {
  double busy = 0;
  for (const double each : replay.busy) busy += each;
  const double all = replay.makespan * static_cast<double>(replay.busy.size());
  return all > 0 ? (all - busy) / all : 0;
}

double bubble_over_work(const Replay& replay) {
  double largest = 0;
  for (const double busy : replay.busy) {
    if (busy > 0) largest = std::max(largest, (replay.makespan - busy) / busy);
  }
  return largest;
}

double window_bubble(const Replay& replay) {
  double largest = 0;
  for (std::size_t rank = 0; rank < replay.busy.size(); ++rank) {
    const double window = replay.window[rank];
    if (window > 0) {
      largest = std::max(largest, (window - replay.busy[rank]) / window);
    }
  }
  return largest;
}

}  // namespace shardbook::pipeline
