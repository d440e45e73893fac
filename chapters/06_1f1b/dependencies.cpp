#include "chapters/06_1f1b/dependencies.h"

#include <algorithm>

#include "chapters/06_1f1b/internal/at.h"

namespace shardbook::pipeline {
namespace {

constexpr std::size_t kKinds = 4;  // an update is nobody's input

}  // namespace

Dependencies::Dependencies(const Schedule& schedule) : schedule_(schedule) {
  const int m = schedule.num_micro_batches;
  stages_.resize(at(schedule.num_ranks));
  for (const Route& route : schedule.routes) {
    for (int stage = 0; at(stage) < route.size(); ++stage) {
      const Place& place = route[at(stage)];
      auto& row = stages_[at(place.rank)];
      row.resize(std::max(row.size(), at(place.chunk) + 1), -1);
      row[at(place.chunk)] = stage;
    }
  }
  for (int rank = 0; rank < schedule.num_ranks; ++rank) {
    const auto chunks = static_cast<int>(stages_[at(rank)].size());
    std::vector<int> index(at(chunks) * at(m) * kKinds, -1);
    int i = 0;
    for (const Action& each : schedule.actions[at(rank)]) {
      const bool is_in_range = each.micro_batch >= 0 && each.micro_batch < m &&
                               each.chunk >= 0 && each.chunk < chunks;
      if (is_in_range && each.kind != ActionKind::kUpdate) {
        int& slot =
            index[(at(each.chunk) * at(m) + at(each.micro_batch)) * kKinds +
                  static_cast<std::size_t>(each.kind)];
        if (slot < 0) slot = i;
      }
      ++i;
    }
    index_.push_back(std::move(index));
  }
}

ActionPlace Dependencies::find(const Place& place, int micro_batch,
                               std::initializer_list<ActionKind> kinds) const {
  const std::size_t slot =
      (at(place.chunk) * at(schedule_.num_micro_batches) + at(micro_batch)) *
      kKinds;
  ActionPlace result{
      place.rank, -1, {*kinds.begin(), micro_batch, place.chunk, false}};
  for (const ActionKind kind : kinds) {
    const int index =
        index_[at(place.rank)][slot + static_cast<std::size_t>(kind)];
    if (index < 0) continue;
    result.index = index;
    result.action.kind = kind;
    break;
  }
  return result;
}

int Dependencies::stage(int rank, int chunk) const {
  return stages_[at(rank)][at(chunk)];
}

const std::vector<int>& Dependencies::stages(int rank) const {
  return stages_[at(rank)];
}

std::vector<ActionPlace> Dependencies::of(int rank, int index) const {
  const auto& list = schedule_.actions[at(rank)];
  const Action& a = list[at(index)];
  const Place here{rank, a.chunk};
  const int b = a.micro_batch, stage = this->stage(rank, a.chunk);
  std::vector<ActionPlace> result;
  switch (a.kind) {
    case ActionKind::kForward:
      if (stage > 0) {
        result.push_back(
            find(schedule_.place(b, stage - 1), b, {ActionKind::kForward}));
      }
      break;
    case ActionKind::kBackward:
    case ActionKind::kBackwardInput:
      result.push_back(find(here, b, {ActionKind::kForward}));
      if (stage + 1 < schedule_.num_stages) {
        result.push_back(
            find(schedule_.place(b, stage + 1), b,
                 {ActionKind::kBackward, ActionKind::kBackwardInput}));
      }
      break;
    case ActionKind::kBackwardWeight:
      result.push_back(find(here, b, {ActionKind::kBackwardInput}));
      break;
    case ActionKind::kUpdate: {
      // Gradients since the update before, those of the replicas too
      int first = 0;
      for (int i = index - 1; i >= 0 && first == 0; --i) {
        const Action& other = list[at(i)];
        if (other.kind == a.kind && other.chunk == a.chunk) {
          first = other.micro_batch + 1;
        }
      }
      for (int each = first; each <= b; ++each) {
        result.push_back(
            find(schedule_.place(each, stage), each,
                 {ActionKind::kBackward, ActionKind::kBackwardWeight}));
      }
      break;
    }
  }
  return result;
}

}  // namespace shardbook::pipeline
