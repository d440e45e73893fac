#include "chapters/common/pipeline/check.h"

#include <algorithm>
#include <map>
#include <set>

#include "chapters/common/pipeline/at.h"
#include "chapters/common/pipeline/check_rank.h"
#include "chapters/common/pipeline/dependencies.h"
#include "core/check.h"

namespace shardbook::pipeline {
namespace {

// Counts and routes

void check_route(const Schedule& s, const Route& route,
                 std::map<std::pair<int, int>, int>* stage_of) {
  const auto fail = [&](const auto&... parts) {
    SB_FAIL("schedule '", s.name, "': ", parts...);
  };
  if (route.size() != at(s.num_stages)) {
    fail("a route has ", route.size(), " places for ", s.num_stages, " stages");
  }
  std::set<std::pair<int, int>> visited;
  for (int stage = 0; stage < s.num_stages; ++stage) {
    const auto [rank, chunk] = route[at(stage)];
    if (rank < 0 || rank >= s.num_ranks) {
      fail("stage ", stage, " lies at rank ", rank, "; give 0 to ",
           s.num_ranks - 1);
    }
    if (chunk < 0 || chunk >= s.num_stages) {
      fail("stage ", stage, " lies at chunk ", chunk, "; give 0 to ",
           s.num_stages - 1);
    }
    const std::pair<int, int> key(rank, chunk);
    const auto found = stage_of->emplace(key, stage).first;
    if (!visited.insert(key).second || found->second != stage) {
      fail("stages ", found->second, " and ", stage, " lie at chunk ", chunk,
           " of rank ", rank, "; give each a chunk of its own");
    }
  }
}

void check_routes(const Schedule& s) {
  const auto fail = [&](const auto&... parts) {
    SB_FAIL("schedule '", s.name, "': ", parts...);
  };
  if (s.num_ranks < 1 || s.num_stages < 1 || s.num_micro_batches < 1) {
    fail(s.num_ranks, " ranks, ", s.num_stages, " stages and ",
         s.num_micro_batches, " micro-batches; give at least 1 of each");
  }
  if (s.actions.size() != at(s.num_ranks)) {
    fail("lists for ", s.actions.size(), " ranks; give one for each of ",
         s.num_ranks);
  }
  if (s.route_of.size() != at(s.num_micro_batches)) {
    fail("routes for ", s.route_of.size(), " micro-batches of ",
         s.num_micro_batches);
  }
  for (const int route : s.route_of) {
    if (route < 0 || at(route) >= s.routes.size()) {
      fail("a micro-batch takes route ", route, " of ", s.routes.size());
    }
  }
  std::map<std::pair<int, int>, int> stage_of;
  for (const Route& route : s.routes) check_route(s, route, &stage_of);
  for (int rank = 0; rank < s.num_ranks; ++rank) {
    const auto first = stage_of.lower_bound({rank, 0});
    if (first == stage_of.end() || first->first.first != rank) {
      fail("no stage lies at rank ", rank);
    }
    int next = 0;
    for (auto each = first; each != stage_of.end() && each->first.first == rank;
         ++each) {
      if (each->first.second != next) {
        fail("rank ", rank, " has a stage at chunk ", each->first.second,
             " and none at chunk ", next, "; number chunks from 0");
      }
      ++next;
    }
  }
  const int per_step = s.micro_batches_per_step;
  if (s.flushes && per_step != s.num_micro_batches) {
    fail(per_step,
         " micro-batches per step; a schedule without updates is one "
         "step; give ",
         s.num_micro_batches);
  }
  if (per_step < 1 || s.num_micro_batches % per_step != 0) {
    fail(per_step, " micro-batches per step; give a divisor of ",
         s.num_micro_batches, ", the micro-batches");
  }
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
    const std::size_t num_more =
        chain.size() > kShown ? chain.size() - kShown : 0;
    const int first = chain[0];
    chain.resize(chain.size() - num_more);
    for (const int each : chain) {
      const ActionPlace what = blocker(each);
      text += (each == first ? "rank " : ", rank ") + std::to_string(each) +
              " (at " + to_string(s_.actions[at(each)][at(next_[at(each)])]) +
              ") waits for " + to_string(what.action) + " of rank " +
              std::to_string(what.rank);
    }
    if (num_more > 0) {
      text += ", and so on for " + std::to_string(num_more) + " more ranks";
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
