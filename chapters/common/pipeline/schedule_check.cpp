#include "chapters/common/pipeline/schedule_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "chapters/common/pipeline/dependencies.h"
#include "chapters/common/pipeline/schedule.h"
#include "core/check.h"
#include "core/how_many.h"

namespace shardbook::pipeline {
namespace {

// Counts and routes

// Adds the stages of a route's places.
void check_route(const Schedule& s, const std::string& who, const Route& route,
                 std::map<std::pair<int, int>, int>& stage_of) {
  SB_CHECK(route.size() == at(s.num_stages), who, "a route has ", route.size(),
           " places for ", how_many(s.num_stages, "stage"));
  std::set<std::pair<int, int>> visited;
  for (int stage = 0; stage < s.num_stages; ++stage) {
    const auto [rank, chunk] = route[at(stage)];
    SB_CHECK(rank >= 0 && rank < s.num_ranks, who, "stage ", stage,
             " lies at rank ", rank, "; give 0 to ", s.num_ranks - 1);
    SB_CHECK(chunk >= 0 && chunk < s.num_stages, who, "stage ", stage,
             " lies at chunk ", chunk, "; give 0 to ", s.num_stages - 1);
    const auto found = stage_of.try_emplace({rank, chunk}, stage).first;
    SB_CHECK(visited.insert(found->first).second && found->second == stage, who,
             "stages ", found->second, " and ", stage, " lie at chunk ", chunk,
             " of rank ", rank, "; give each a chunk of its own");
  }
}

void check_routes(const Schedule& s) {
  const std::string who = "schedule '" + s.name + "': ";
  SB_CHECK(s.num_ranks >= 1 && s.num_stages >= 1 && s.num_micro_batches >= 1,
           who, how_many(s.num_ranks, "rank"), ", ",
           how_many(s.num_stages, "stage"), " and ",
           how_many(s.num_micro_batches, "micro-batch"),
           "; give at least 1 of each");
  SB_CHECK(s.actions.size() == at(s.num_ranks), who, "lists for ",
           how_many(s.actions.size(), "rank"), "; give one for each of ",
           s.num_ranks);
  SB_CHECK(s.route_of.size() == at(s.num_micro_batches), who, "routes for ",
           how_many(s.route_of.size(), "micro-batch"), " of ",
           s.num_micro_batches);
  for (const int route : s.route_of) {
    SB_CHECK(route >= 0 && at(route) < s.routes.size(), who,
             "a micro-batch takes route ", route, " of ", s.routes.size());
  }
  std::map<std::pair<int, int>, int> stage_of;
  for (const Route& route : s.routes) check_route(s, who, route, stage_of);
  for (int rank = 0; rank < s.num_ranks; ++rank) {
    auto next = stage_of.lower_bound({rank, 0});
    SB_CHECK(next != stage_of.end() && next->first.first == rank, who,
             "no stage lies at rank ", rank);
    for (int chunk = 0; next != stage_of.end() && next->first.first == rank;
         ++next, ++chunk) {
      SB_CHECK(next->first.second == chunk, who, "rank ", rank,
               " has a stage at chunk ", next->first.second,
               " and none at chunk ", chunk, "; number chunks from 0");
    }
  }
  const int per_step = s.micro_batches_per_step;
  SB_CHECK(!s.flushes || per_step == s.num_micro_batches, who,
           how_many(per_step, "micro-batch"),
           " per step; a schedule without updates is one step; give ",
           s.num_micro_batches);
  SB_CHECK(per_step >= 1 && s.num_micro_batches % per_step == 0, who,
           how_many(per_step, "micro-batch"), " per step; give a divisor of ",
           s.num_micro_batches, ", the micro-batches");
}

// The list of one rank alone

unsigned bit(ActionKind kind) { return 1u << static_cast<int>(kind); }

constexpr unsigned kF = 1, kB = 2, kI = 4, kW = 8;

/// The actions that a rank has done so far.
class RankState {
 public:
  /// `stages`: by chunk, -1 for none. Keeps references.
  RankState(const Schedule& s, const ReadVersions& reads, int rank,
            const std::vector<int>& stages)
      : s_(s), reads_(reads), rank_(rank), chunks_(stages.size()) {
    for (std::size_t c = 0; c < chunks_.size(); ++c) {
      chunks_[c].done.assign(static_cast<std::size_t>(s.num_micro_batches), 0);
      chunks_[c].stage = stages[c];
    }
  }

  /// Does the action. Returns the rule that it breaks, or "".
  std::string apply(const Action& a);
  /// What is missing at the end of the list, or "".
  std::string missing() const;

 private:
  struct Chunk {
    int stage = -1;
    std::vector<unsigned> done;  ///< by micro-batch, one bit per kind
    std::deque<int> waiting;     ///< micro-batches between I and W
    int last_gradient = -1;      ///< of B, W or I (biases and norms)
    int updated = -1;  ///< last micro-batch that an update has claimed
    int version = 0;   ///< updates so far
  };

  bool comes_here(int micro_batch, int chunk) const;
  std::string apply_update(const Action& a, Chunk* chunk);
  std::string apply_backward(const Action& a, Chunk* chunk);

  const Schedule& s_;
  const ReadVersions& reads_;
  int rank_;
  std::vector<Chunk> chunks_;
};

bool RankState::comes_here(int b, int chunk) const {
  const int stage = chunks_[at(chunk)].stage;
  if (stage < 0) return false;
  const Place& place = s_.place(b, stage);
  return place.rank == rank_ && place.chunk == chunk;
}

std::string RankState::apply(const Action& a) {
  const std::string name = to_string(a);
  if (a.chunk < 0 || at(a.chunk) >= chunks_.size()) {
    return fmt::format("{} for chunk {}; there are {}", name, a.chunk,
                       chunks_.size());
  }
  if (a.micro_batch < 0 || a.micro_batch >= s_.num_micro_batches) {
    return fmt::format("{} for micro-batch {}; there are {}", name,
                       a.micro_batch, s_.num_micro_batches);
  }
  Chunk& chunk = chunks_[at(a.chunk)];
  if (a.kind == ActionKind::kUpdate) return apply_update(a, &chunk);
  if (!comes_here(a.micro_batch, a.chunk)) {
    return name + ", whose route does not lead here";
  }
  unsigned& done = chunk.done[at(a.micro_batch)];
  if (done & bit(a.kind)) return name + " a second time";
  if (a.kind != ActionKind::kForward) {
    const std::string fault = apply_backward(a, &chunk);
    if (!fault.empty()) return fault;
  } else if (!s_.flushes) {
    const int version = reads_.of(chunk.stage, a.micro_batch);
    if (version > chunk.version) {
      return fmt::format(
          "{} reads version {} of the weights, which no update has made yet",
          name, version);
    }
  }
  done |= bit(a.kind);
  return "";
}

std::string RankState::apply_backward(const Action& a, Chunk* chunk) {
  const auto name = [&](ActionKind kind, int b) {
    return to_string(Action{kind, b, a.chunk, false});
  };
  const int b = a.micro_batch;
  const unsigned done = chunk->done[at(b)];
  const std::string self = to_string(a);
  if (!(done & kF)) {
    return self + " before its forward " + name(ActionKind::kForward, b);
  }
  if (a.kind != ActionKind::kBackwardWeight) {
    if (done & (kB | kI)) {
      return fmt::format("{} after another backward of micro-batch {}", self,
                         b);
    }
    if (a.kind == ActionKind::kBackwardInput) chunk->waiting.push_back(b);
  } else {
    if (done & kB) return self + " after the whole backward of it";
    if (!(done & kI)) {
      return self + " before its input gradient " +
             name(ActionKind::kBackwardInput, b);
    }
    if (chunk->waiting.front() != b) {
      return self + " while " +
             name(ActionKind::kBackwardWeight, chunk->waiting.front()) +
             " has waited longer; they run first in, first out";
    }
    chunk->waiting.pop_front();
  }
  if (b <= chunk->updated) return self + " after an update that claims it";
  chunk->last_gradient = std::max(chunk->last_gradient, b);
  return "";
}

std::string RankState::apply_update(const Action& a, Chunk* chunk) {
  const std::string self = to_string(a);
  if (s_.flushes) {
    return self + " in a schedule that flushes: its update follows the lists";
  }
  if (a.micro_batch <= chunk->updated) {
    return self + " after an update that claims as much";
  }
  for (int b = chunk->updated + 1; b <= a.micro_batch; ++b) {
    if (comes_here(b, a.chunk) && !(chunk->done[at(b)] & (kB | kW))) {
      return fmt::format("{} before the gradient of micro-batch {}", self, b);
    }
  }
  if (chunk->last_gradient > a.micro_batch) {
    return fmt::format(
        "{} after the gradient of micro-batch {}, which it does not claim",
        self, chunk->last_gradient);
  }
  const int claimed = a.micro_batch - chunk->updated;
  const int size = reads_.micro_batches_per_update(chunk->stage);
  if (claimed != size) {
    return fmt::format(
        "{} claims {}; each update of this stage claims {} "
        "(micro_batches_per_step times the stage's ranks)",
        self, how_many(claimed, "micro-batch"), size);
  }
  chunk->updated = a.micro_batch;
  ++chunk->version;
  return "";
}

std::string RankState::missing() const {
  for (int c = 0; at(c) < chunks_.size(); ++c) {
    const Chunk& chunk = chunks_[at(c)];
    for (int b = 0; b < s_.num_micro_batches; ++b) {
      if (!comes_here(b, c)) continue;
      const unsigned done = chunk.done[at(b)];
      const ActionKind kind = !(done & kF)  ? ActionKind::kForward
                              : (done & kI) ? ActionKind::kBackwardWeight
                                            : ActionKind::kBackward;
      if (!(done & (kB | kW))) return to_string({kind, b, c, false});
    }
    if (chunk.stage >= 0 && !s_.flushes &&
        chunk.updated < s_.num_micro_batches - 1) {
      return fmt::format("the update for micro-batch {}",
                         s_.num_micro_batches - 1);
    }
  }
  return "";
}

// All ranks together

class Checker {
 public:
  explicit Checker(const Schedule& s)
      : s_(s), reads_(s), dependencies_(s), ticks_(at(s.num_ranks)) {
    for (int rank = 0; rank < s.num_ranks; ++rank) {
      states_.emplace_back(s, reads_, rank, dependencies_.stages(rank));
      ends_.emplace_back(s.actions[at(rank)].size(), -1);
    }
  }

  void run() {
    next_.assign(at(s_.num_ranks), 0);
    faults_.assign(at(s_.num_ranks), "");
    applied_.assign(at(s_.num_ranks), 0);
    for (bool is_moving = true; is_moving;) {
      is_moving = false;
      for (int rank = 0; rank < s_.num_ranks; ++rank) {
        while (step(rank)) is_moving = true;
      }
    }
    report();
  }

 private:
  bool is_at_end(int rank) const {
    return at(next_[at(rank)]) == s_.actions[at(rank)].size();
  }

  /// 2 for a pair that overlaps, 1 otherwise.
  int num_together(int rank) const {
    return s_.actions[at(rank)][at(next_[at(rank)])].overlaps_next ? 2 : 1;
  }

  std::string pair_fault(int rank, int first) const {
    const auto& list = s_.actions[at(rank)];
    const std::string self = to_string(list[at(first)]);
    if (at(first) + 1 == list.size()) return self + " overlaps nothing";
    const Action &a = list[at(first)], &b = list[at(first) + 1];
    const std::string both = self + " overlaps " + to_string(b);
    if (b.overlaps_next) return both + ", which overlaps a third";
    const auto is_backward = [](const Action& x) {
      return x.kind == ActionKind::kBackward ||
             x.kind == ActionKind::kBackwardInput;
    };
    if (a.kind != ActionKind::kForward || !is_backward(b)) {
      return both + "; a pair is a forward and a backward";
    }
    if (a.micro_batch == b.micro_batch && a.chunk == b.chunk) {
      return both + ", which needs it";
    }
    return "";
  }

  /// Applies the rank's next action to its own state, once. False at the end of
  /// the list and after a fault.
  bool is_sound(int rank) {
    if (!faults_[at(rank)].empty()) return false;
    const int first = next_[at(rank)];
    if (is_at_end(rank)) {
      const std::string missing = states_[at(rank)].missing();
      if (!missing.empty()) faults_[at(rank)] = "ends without " + missing;
      return false;
    }
    if (applied_[at(rank)] > first) return true;
    const auto& list = s_.actions[at(rank)];
    std::string& fault = faults_[at(rank)];
    if (list[at(first)].overlaps_next) fault = pair_fault(rank, first);
    const int count = num_together(rank);
    for (int i = first; i < first + count && fault.empty(); ++i) {
      fault = states_[at(rank)].apply(list[at(i)]);
    }
    applied_[at(rank)] = first + count;
    return fault.empty();
  }

  bool step(int rank) {
    if (!is_sound(rank)) return false;
    const int first = next_[at(rank)], count = num_together(rank);
    int begin = ticks_[at(rank)];
    for (int i = first; i < first + count; ++i) {
      for (const ActionPlace& each : dependencies_.of(rank, i)) {
        const int end =
            each.index < 0 ? -1 : ends_[at(each.rank)][at(each.index)];
        if (end < 0) return false;
        begin = std::max(begin, end);
      }
    }
    for (int i = first; i < first + count; ++i) {
      const auto kind = s_.actions[at(rank)][at(i)].kind;
      begin += kind == ActionKind::kUpdate ? 0 : 1;
      ends_[at(rank)][at(i)] = begin;
    }
    ticks_[at(rank)] = begin;
    next_[at(rank)] += count;
    return true;
  }

  /// The action that a blocked rank waits for.
  ActionPlace blocker(int rank) const {
    const int first = next_[at(rank)];
    for (int i = first; i < first + num_together(rank); ++i) {
      for (const ActionPlace& each : dependencies_.of(rank, i)) {
        if (each.index < 0 || ends_[at(each.rank)][at(each.index)] < 0) {
          return each;
        }
      }
    }
    return {};
  }

  [[noreturn]] void fail(int rank, const std::string& what) const {
    SB_FAIL("schedule '", s_.name, "': tick ", ticks_[at(rank)], ", rank ",
            rank, ": ", what);
  }

  void report() const {
    int first = -1, stuck = -1;
    for (int rank = 0; rank < s_.num_ranks; ++rank) {
      if (!faults_[at(rank)].empty() &&
          (first < 0 || ticks_[at(rank)] < ticks_[at(first)])) {
        first = rank;
      }
      if (faults_[at(rank)].empty() && !is_at_end(rank)) stuck = rank;
    }
    if (first >= 0) fail(first, faults_[at(first)]);
    if (stuck >= 0) report_deadlock(stuck);
  }

  /// Reports a cycle of ranks that wait for each other.
  void report_deadlock(int rank) const {
    std::vector<int> chain;
    while (std::find(chain.begin(), chain.end(), rank) == chain.end()) {
      chain.push_back(rank);
      rank = blocker(rank).rank;
    }
    chain.erase(chain.begin(), std::find(chain.begin(), chain.end(), rank));
    std::rotate(chain.begin(), std::min_element(chain.begin(), chain.end()),
                chain.end());
    std::string text = "deadlock: ";
    constexpr std::size_t kShown = 8;
    const int first = chain[0];
    for (std::size_t i = 0; i < std::min(chain.size(), kShown); ++i) {
      const int each = chain[i];
      const ActionPlace what = blocker(each);
      text += fmt::format("{}rank {} (at {}) waits for {} of rank {}",
                          i == 0 ? "" : ", ", each,
                          to_string(s_.actions[at(each)][at(next_[at(each)])]),
                          to_string(what.action), what.rank);
    }
    if (chain.size() > kShown) {
      text +=
          fmt::format(", and so on for {} more ranks", chain.size() - kShown);
    }
    fail(first, text);
  }

  const Schedule& s_;
  ReadVersions reads_;
  Dependencies dependencies_;
  std::vector<RankState> states_;
  std::vector<std::vector<int>> ends_;
  std::vector<int> ticks_, next_, applied_;
  std::vector<std::string> faults_;
};

}  // namespace

void check(const Schedule& schedule) {
  check_routes(schedule);
  Checker(schedule).run();
}

}  // namespace shardbook::pipeline
