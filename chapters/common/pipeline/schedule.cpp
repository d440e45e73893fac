#include "chapters/common/pipeline/schedule.h"

#include <algorithm>

#include "core/check.h"
#include "core/how_many.h"

namespace shardbook::pipeline {

std::vector<int> Schedule::stages(int rank) const {
  std::vector<int> stages;
  for (const Route& route : routes) {
    for (std::size_t stage = 0; stage < route.size(); ++stage) {
      if (route[stage].rank != rank) continue;
      const std::size_t chunk = at(route[stage].chunk);
      stages.resize(std::max(stages.size(), chunk + 1), -1);
      stages[chunk] = static_cast<int>(stage);
    }
  }
  return stages;
}

int Schedule::stage_at(int rank, int chunk) const {
  const std::vector<int> here = stages(rank);
  SB_CHECK(chunk >= 0 && chunk < static_cast<int>(here.size()) &&
               here[at(chunk)] >= 0,
           "schedule '", name, "': no stage lies at chunk ", chunk, " of rank ",
           rank, "; it has ", how_many(num_stages, "stage"), " on ",
           how_many(num_ranks, "rank"));
  return here[at(chunk)];
}

bool Schedule::splits_backward() const {
  for (const auto& list : actions) {
    for (const Action& each : list) {
      if (each.kind == ActionKind::kBackwardWeight) return true;
    }
  }
  return false;
}

std::vector<int> Schedule::owners(int stage) const {
  std::vector<int> ranks;
  for (const Route& route : routes) {
    const int rank = route[at(stage)].rank;
    if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) {
      ranks.push_back(rank);
    }
  }
  return ranks;
}

ActionWalk::ActionWalk(const Schedule& schedule, int rank)
    : list_(&schedule.actions[at(rank)]),
      period_(schedule.period),
      left_(schedule.repeats) {
  if (left_ > 0) steady_ = schedule.steady[at(rank)];
}

Action ActionWalk::next() {
  Action action = (*list_)[next_++];
  action.micro_batch += shift_;
  if (left_ > 0 && next_ == at(steady_.end)) {
    next_ = at(steady_.begin);
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

// --- Recomputation -----------------------------------------------------------

Recompute recompute_from_name(const std::string& name) {
  if (name == "always") return Recompute::kAlways;
  if (name == "except_last") return Recompute::kExceptLast;
  if (name == "never") return Recompute::kNever;
  SB_FAIL("--recompute ", name, ": give always, except_last or never");
}

Recomputed::Recomputed(const Schedule& schedule, int rank, Recompute mode)
    : mode_(mode) {
  const auto& list = schedule.actions[at(rank)];
  for (std::size_t i = 0; i + 1 < list.size(); ++i) {
    const Action &now = list[i], &next = list[i + 1];
    const bool is_backward = next.kind == ActionKind::kBackward ||
                             next.kind == ActionKind::kBackwardInput;
    if (now.kind == ActionKind::kForward && is_backward &&
        next.micro_batch == now.micro_batch && next.chunk == now.chunk) {
      backward_is_next_.emplace(now.micro_batch, now.chunk);
    }
  }
}

bool Recomputed::contains(int micro_batch, int chunk) const {
  if (mode_ == Recompute::kNever) return false;
  return mode_ == Recompute::kAlways ||
         backward_is_next_.count({micro_batch, chunk}) == 0;
}

// --- Building blocks ---------------------------------------------------------

namespace parts {

Schedule empty(const std::string& name, int p, int m, int chunks) {
  SB_CHECK(p >= 1, "--schedule ", name, ": ", how_many(p, "rank"),
           "; give at least 1");
  SB_CHECK(m >= 1, "--schedule ", name, ": ", how_many(m, "micro-batch"),
           "; give at least 1");
  Schedule schedule;
  schedule.name = name;
  schedule.num_ranks = p;
  schedule.num_stages = p * chunks;
  schedule.num_micro_batches = schedule.micro_batches_per_step = m;
  schedule.routes.resize(1);
  for (int stage = 0; stage < p * chunks; ++stage) {
    schedule.routes[0].push_back({stage % p, stage / p});
  }
  schedule.route_of.assign(at(m), 0);
  schedule.actions.resize(at(p));
  return schedule;
}

Actions warm_up_pairs_drain(const Actions& forwards, const Actions& backwards,
                            int warm_up) {
  const auto total = static_cast<int>(forwards.size());
  Actions list(forwards.begin(), forwards.begin() + std::min(warm_up, total));
  for (int k = 0; k < total; ++k) {
    if (k + warm_up < total) list.push_back(forwards[at(k + warm_up)]);
    list.push_back(backwards[at(k)]);
  }
  return list;
}

}  // namespace parts

}  // namespace shardbook::pipeline
