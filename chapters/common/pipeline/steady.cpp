#include "chapters/common/pipeline/steady.h"

#include <algorithm>
#include <map>
#include <utility>

#include "chapters/common/pipeline/schedule.h"

namespace shardbook::pipeline {
namespace {

bool is_same(const Action& a, const Action& b, int micro_batches_later) {
  return a.kind == b.kind && a.chunk == b.chunk &&
         a.overlaps_next == b.overlaps_next &&
         a.micro_batch + micro_batches_later == b.micro_batch;
}

// Finds the longest part of a list in which each action recurs `length` actions
// and `period` micro-batches later: its begin, and how often it repeats.
std::pair<int, int> longest_repetition(const std::vector<Action>& list,
                                       int length, int period) {
  int best_begin = 0, best_end = 0, begin = 0;
  const int last = static_cast<int>(list.size()) - length;
  for (int i = 0; i <= last; ++i) {
    const bool repeats =
        i < last && is_same(list[at(i)], list[at(i + length)], period);
    if (repeats) continue;
    if (i - begin > best_end - best_begin) {
      best_begin = begin;
      best_end = i;
    }
    begin = i + 1;
  }
  const int count =
      best_end > best_begin ? (best_end - best_begin) / length + 1 : 0;
  return {best_begin, count};
}

// The product of an action for others: the forward or backward of a stage.
using Product = std::pair<int, bool>;

struct Search {
  const Schedule& schedule;
  int period;
  std::vector<int> begins, counts, lengths;

  std::vector<std::pair<Product, int>> made(int rank, bool is_needed) const {
    std::vector<std::pair<Product, int>> result;
    const auto& list = schedule.actions[at(rank)];
    const std::vector<int> stages = schedule.stages(rank);
    for (int i = 0; i < lengths[at(rank)]; ++i) {
      const Action& action = list[at(begins[at(rank)] + i)];
      const bool is_forward = action.kind == ActionKind::kForward;
      if (action.kind == ActionKind::kBackwardWeight) continue;
      int stage = stages[at(action.chunk)];
      if (is_needed) stage += is_forward ? -1 : 1;
      if (stage < 0 || stage >= schedule.num_stages) continue;
      result.push_back({{stage, is_forward}, action.micro_batch});
    }
    return result;
  }

  // Moves the begin of a rank for whose later repetition another rank's
  // repetition 0 waits. False if this does not end.
  bool align() {
    const auto p = static_cast<int>(begins.size());
    std::map<Product, std::vector<std::pair<int, int>>> makers;
    for (int rank = 0; rank < p; ++rank) {
      for (const auto& [product, b] : made(rank, false)) {
        makers[product].push_back({rank, b});
      }
    }
    std::vector<int> later(at(p), 0);
    for (int round = 0; round <= p; ++round) {
      bool changes = false;
      for (int rank = 0; rank < p; ++rank) {
        for (const auto& [product, b] : made(rank, true)) {
          const auto found = makers.find(product);
          if (found == makers.end()) return false;
          for (const auto& [maker, made_b] : found->second) {
            // Find the repetition that makes b; repetition 0 makes made_b
            if ((b - made_b) % period != 0) continue;
            const int least = later[at(rank)] + (b - made_b) / period;
            if (later[at(maker)] >= least) continue;
            later[at(maker)] = least;
            changes = true;
          }
        }
      }
      if (changes) continue;
      for (int rank = 0; rank < p; ++rank) {
        begins[at(rank)] += later[at(rank)] * lengths[at(rank)];
        counts[at(rank)] -= later[at(rank)];
      }
      return true;
    }
    return false;
  }
};

Steady with_period(const Schedule& schedule, int period) {
  Search search = {schedule, period, {}, {}, {}};
  for (const auto& list : schedule.actions) {
    const int num_actions = static_cast<int>(list.size()) * period;
    if (num_actions % schedule.num_micro_batches != 0) return {};
    const int length = num_actions / schedule.num_micro_batches;
    const auto [begin, count] = longest_repetition(list, length, period);
    if (count == 0) return {};
    search.begins.push_back(begin);
    search.counts.push_back(count);
    search.lengths.push_back(length);
  }
  if (!search.align()) return {};
  Steady result;
  result.period = period;
  result.count = *std::min_element(search.counts.begin(), search.counts.end());
  if (result.count <= 0) return {};
  for (std::size_t rank = 0; rank < search.begins.size(); ++rank) {
    result.first.push_back(
        {search.begins[rank], search.begins[rank] + search.lengths[rank]});
  }
  return result;
}

}  // namespace

Steady steady_state(const Schedule& schedule) {
  if (!schedule.flushes || schedule.routes.size() != 1 ||
      schedule.num_micro_batches == 0) {
    return {};
  }
  for (const int period : {1, schedule.num_ranks}) {
    Steady found = with_period(schedule, period);
    if (found.count > 1) return found;
  }
  return {};
}

}  // namespace shardbook::pipeline
