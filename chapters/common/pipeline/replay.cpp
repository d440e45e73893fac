#include "chapters/common/pipeline/replay.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "chapters/common/pipeline/dependencies.h"
#include "chapters/common/pipeline/schedule.h"
#include "chapters/common/pipeline/schedule_check.h"
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

bool is_forward(const Action& a) { return a.kind == ActionKind::kForward; }

class Player {
 public:
  Player(const Schedule& schedule, const CostsOf& costs,
         const ReplayOptions& options)
      : schedule_(schedule),
        costs_(costs),
        options_(options),
        dependencies_(schedule) {}

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

  std::vector<double> flushed() const {
    std::vector<double> ends;
    for (const auto& done : spans_) {
      ends.push_back(done.empty() ? 0 : done.back().end);
    }
    for (const auto& [line, free] : line_free_) {
      double& end = ends[at(line.first)];
      end = std::max(end, free);
    }
    return ends;
  }

 private:
  Costs costs(int rank, const Action& a) const {
    return costs_(dependencies_.stage(rank, a.chunk), a.micro_batch);
  }

  /// The time at which all inputs of an action have arrived; false if unknown.
  bool arrival(int rank, int index, double* time) const {
    for (const ActionPlace& each : dependencies_.of(rank, index)) {
      const auto& done = spans_[at(each.rank)];
      if (at(each.index) >= done.size()) return false;
      const double end = done[at(each.index)].end;
      if (each.rank == rank) {
        *time = std::max(*time, end);
      } else if (!options_.messages) {
        *time =
            std::max(*time, end + costs(each.rank, each.action).communication);
      }
    }
    // Skips come from stages before the one whose message is awaited
    const Action& a = schedule_.actions[at(rank)][at(index)];
    const auto message = arrivals_.find(
        {dependencies_.stage(rank, a.chunk), a.micro_batch, is_forward(a)});
    if (message != arrivals_.end()) *time = std::max(*time, message->second);
    return true;
  }

  void send(int rank, const Action& a, double end) {
    if (!options_.messages || a.kind == ActionKind::kBackwardWeight ||
        a.kind == ActionKind::kUpdate) {
      return;
    }
    const int stage = dependencies_.stage(rank, a.chunk), b = a.micro_batch;
    for (const Message& each : options_.messages(stage, b, is_forward(a))) {
      const int to = schedule_.place(b, each.stage).rank;
      if (to == rank) continue;
      double& free = line_free_[{rank, to}];
      free = std::max(free, end) + each.seconds;
      double& arrival = arrivals_[{each.stage, b, is_forward(a)}];
      arrival = std::max(arrival, free);
    }
  }

  bool step(int rank) {
    const auto& list = schedule_.actions[at(rank)];
    auto& done = spans_[at(rank)];
    if (done.size() == list.size()) return false;
    const int first = static_cast<int>(done.size());
    const Action& a = list[at(first)];
    const Costs own = costs(rank, a);
    double begin = options_.begins.empty() ? 0 : options_.begins[at(rank)];
    if (!done.empty()) begin = done.back().end;
    double length = duration(own, a.kind);
    const bool is_backward =
        a.kind == ActionKind::kBackward || a.kind == ActionKind::kBackwardInput;
    if (is_backward && options_.recomputes && options_.recomputes(rank, a)) {
      (options_.early_recompute ? begin : length) += own.forward;
    }
    if (!arrival(rank, first, &begin)) return false;
    if (a.overlaps_next) {
      const Action& b = list[at(first) + 1];
      if (!arrival(rank, first + 1, &begin)) return false;
      const Costs other = costs(rank, b);
      const double pair = std::max(own.overlapped_pair, other.overlapped_pair);
      length = pair < 0 ? length + duration(other, b.kind) : pair;
      done.push_back({begin, begin + length});
      send(rank, b, begin + length);
    }
    done.push_back({begin, begin + length});
    send(rank, a, begin + length);
    return true;
  }

  const Schedule& schedule_;
  const CostsOf& costs_;
  const ReplayOptions& options_;
  Dependencies dependencies_;
  std::vector<std::vector<Span>> spans_;
  /// For messages that follow each other: when the line between two ranks is
  /// free, and when the inputs of a forward (or backward) have arrived.
  std::map<std::pair<int, int>, double> line_free_;
  std::map<std::tuple<int, int, bool>, double> arrivals_;
};

/// The replay with these spans, by rank and action.
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

}  // namespace

Replay replay(const Schedule& schedule, const CostsOf& costs,
              const ReplayOptions& options) {
  check(schedule);
  Player player(schedule, costs, options);
  Replay result = replay_of(schedule, player.run());
  result.flushed = player.flushed();
  return result;
}

Replay replay(const Schedule& schedule, const Costs& costs) {
  return replay(schedule, [&](int, int) { return costs; });
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
