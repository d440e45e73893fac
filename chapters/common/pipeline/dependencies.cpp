#include "chapters/common/pipeline/dependencies.h"

#include <algorithm>

#include "chapters/common/pipeline/schedule.h"

namespace shardbook::pipeline {
namespace {

constexpr std::size_t kKinds = 4;  // no action reads an update

}  // namespace

Dependencies::Dependencies(const Schedule& schedule)
    : schedule_(schedule), owners_(at(schedule.num_stages)) {
  const int m = schedule.num_micro_batches;
  for (int rank = 0; rank < schedule.num_ranks; ++rank) {
    const auto& row = stages_.emplace_back(schedule.stages(rank));
    for (int chunk = 0; at(chunk) < row.size(); ++chunk) {
      if (row[at(chunk)] >= 0) {
        owners_[at(row[at(chunk)])].push_back({rank, chunk});
      }
    }
  }
  for (int rank = 0; rank < schedule.num_ranks; ++rank) {
    const auto chunks = static_cast<int>(stages_[at(rank)].size());
    std::vector<int> index(at(chunks) * at(m) * kKinds, -1);
    updates_.emplace_back(at(chunks));
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
      if (is_in_range && each.kind == ActionKind::kUpdate) {
        updates_[at(rank)][at(each.chunk)].push_back(i);
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

// The rank's own gradients come earlier in its list. The mean over replicas
// exists once all replicas have reached the same update.
std::vector<ActionPlace> Dependencies::replicas(int rank, int index) const {
  const Action& a = schedule_.actions[at(rank)][at(index)];
  const auto& own = updates_[at(rank)][at(a.chunk)];
  const auto count =
      std::lower_bound(own.begin(), own.end(), index) - own.begin();
  std::vector<ActionPlace> result;
  for (const Place& each : owners_[at(stage(rank, a.chunk))]) {
    if (each.rank == rank && each.chunk == a.chunk) continue;
    const auto& theirs = updates_[at(each.rank)][at(each.chunk)];
    const bool has_one = static_cast<std::size_t>(count) < theirs.size();
    // The action before their update; none if their list begins with it
    const int last = has_one ? theirs[static_cast<std::size_t>(count)] - 1 : -1;
    if (has_one && last < 0) continue;
    result.push_back({each.rank, last,
                      has_one ? schedule_.actions[at(each.rank)][at(last)]
                              : Action{a.kind, a.micro_batch, each.chunk}});
  }
  return result;
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
    case ActionKind::kUpdate:
      return replicas(rank, index);
  }
  return result;
}

// --- Versions ----------------------------------------------------------------

ReadVersions::ReadVersions(const Schedule& schedule) : schedule_(schedule) {
  if (schedule.flushes) return;
  const int m = schedule.num_micro_batches;
  for (int stage = 0; stage < schedule.num_stages; ++stage) {
    replicas_.push_back(schedule.num_replicas(stage));
  }
  newest_.assign(at(schedule.num_stages), std::vector<int>(at(m), 0));
  for (int rank = 0; rank < schedule.num_ranks; ++rank) {
    const std::vector<int> stages = schedule.stages(rank);
    std::vector<int> updates(stages.size(), 0);
    for (const Action& each : schedule.actions[at(rank)]) {
      if (each.chunk < 0 || at(each.chunk) >= updates.size()) continue;
      if (each.kind == ActionKind::kUpdate) ++updates[at(each.chunk)];
      if (each.kind != ActionKind::kForward) continue;
      const int stage = stages[at(each.chunk)];
      if (stage < 0 || each.micro_batch < 0 || each.micro_batch >= m) continue;
      newest_[at(stage)][at(each.micro_batch)] = updates[at(each.chunk)];
    }
  }
}

int ReadVersions::micro_batches_per_update(int stage) const {
  return schedule_.micro_batches_per_step * replicas_[at(stage)];
}

int ReadVersions::of(int stage, int b) const {
  if (schedule_.flushes) return 0;
  switch (schedule_.versions) {
    case VersionRule::kNewest:
      return newest_[at(stage)][at(b)];
    case VersionRule::kFirstStage:
      // An update of a stage with more replicas has more mini-batches
      return newest_[0][at(b)] * replicas_[0] / replicas_[at(stage)];
    case VersionRule::kDelayOne:
      return std::max(0, b / micro_batches_per_update(stage) - 1);
  }
  return 0;
}

}  // namespace shardbook::pipeline
