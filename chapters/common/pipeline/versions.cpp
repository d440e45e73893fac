#include "chapters/common/pipeline/versions.h"

#include <algorithm>

#include "chapters/common/pipeline/at.h"
#include "chapters/common/pipeline/dependencies.h"

namespace shardbook::pipeline {
ReadVersions::ReadVersions(const Schedule& schedule) : schedule_(schedule) {
  if (schedule.flushes) return;
  const int m = schedule.num_micro_batches;
  for (int stage = 0; stage < schedule.num_stages; ++stage) {
    replicas_.push_back(schedule.num_replicas(stage));
  }
  newest_.assign(at(schedule.num_stages), std::vector<int>(at(m), 0));
  const std::vector<std::vector<int>> stages = stages_by_chunk(schedule);
  for (int rank = 0; rank < schedule.num_ranks; ++rank) {
    std::vector<int> updates(stages[at(rank)].size(), 0);
    for (const Action& each : schedule.actions[at(rank)]) {
      if (each.chunk < 0 || at(each.chunk) >= updates.size()) continue;
      if (each.kind == ActionKind::kUpdate) ++updates[at(each.chunk)];
      if (each.kind != ActionKind::kForward) continue;
      const int stage = stages[at(rank)][at(each.chunk)];
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
