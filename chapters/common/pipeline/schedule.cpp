#include "chapters/common/pipeline/schedule.h"

#include <algorithm>

#include "core/check.h"

namespace shardbook::pipeline {

int Schedule::stage_at(int rank, int chunk) const {
  for (const Route& route : routes) {
    for (std::size_t stage = 0; stage < route.size(); ++stage) {
      if (route[stage].rank == rank && route[stage].chunk == chunk) {
        return static_cast<int>(stage);
      }
    }
  }
  SB_FAIL("schedule '", name, "': no stage lies at chunk ", chunk, " of rank ",
          rank, "; it has ", num_stages, " stages on ", num_ranks, " ranks");
}

bool Schedule::splits_backward() const {
  for (const auto& list : actions) {
    for (const Action& each : list) {
      if (each.kind == ActionKind::kBackwardWeight) return true;
    }
  }
  return false;
}

int Schedule::num_chunks(int rank) const {
  int count = 0;
  for (const Route& route : routes) {
    for (const Place& place : route) {
      if (place.rank == rank) count = std::max(count, place.chunk + 1);
    }
  }
  return count;
}

int Schedule::num_replicas(int stage) const {
  std::vector<int> ranks;
  for (const Route& route : routes) {
    const int rank = route[static_cast<std::size_t>(stage)].rank;
    if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) {
      ranks.push_back(rank);
    }
  }
  return static_cast<int>(ranks.size());
}

Walk::Walk(const Schedule& schedule, int rank)
    : list_(&schedule.actions[static_cast<std::size_t>(rank)]),
      period_(schedule.period),
      left_(schedule.repeats) {
  if (left_ > 0) steady_ = schedule.steady[static_cast<std::size_t>(rank)];
}

Action Walk::next() {
  Action action = (*list_)[next_++];
  action.micro_batch += shift_;
  if (left_ > 0 && next_ == static_cast<std::size_t>(steady_.end)) {
    next_ = static_cast<std::size_t>(steady_.begin);
    shift_ += period_;
    --left_;
  }
  return action;
}

std::vector<int> gradient_order(const Schedule& schedule) {
  std::vector<int> order;
  for (std::size_t rank = 0; rank < schedule.actions.size(); ++rank) {
    for (const Action& each : schedule.actions[rank]) {
      if (each.kind != ActionKind::kBackward &&
          each.kind != ActionKind::kBackwardWeight) {
        continue;
      }
      const Place& first = schedule.place(each.micro_batch, 0);
      if (first.rank == static_cast<int>(rank) && first.chunk == each.chunk) {
        order.push_back(each.micro_batch);
      }
    }
  }
  return order;
}

std::string to_string(const Action& action) {
  std::string text(1, "FBIWU"[static_cast<int>(action.kind)]);
  text += std::to_string(action.micro_batch);
  if (action.chunk != 0) text += "." + std::to_string(action.chunk);
  return text;
}

}  // namespace shardbook::pipeline
