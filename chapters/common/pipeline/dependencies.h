#pragma once

// The actions that each action of a schedule waits for, and the version of the
// weights that each forward reads.

#include <initializer_list>
#include <vector>

#include "chapters/common/pipeline/schedule.h"

namespace shardbook::pipeline {

/// An action of a rank's list; index -1 when the list does not contain it.
struct ActionPlace {
  int rank = 0;
  int index = 0;
  Action action;
};

/// The actions that an action waits for, on its own rank and on others.
/// Replicas of a stage update together: each waits until the others reach their
/// update.
class Dependencies {
 public:
  /// Keeps a reference. Cost: one slot per action kind, chunk and micro-batch.
  explicit Dependencies(const Schedule& schedule);
  /// For `rank`'s action at `index`, whose chunk and micro-batch are in range.
  std::vector<ActionPlace> of(int rank, int index) const;
  /// Schedule::stage_at, without a search.
  int stage(int rank, int chunk) const;
  /// The stages of a rank's chunks; -1 where there is none.
  const std::vector<int>& stages(int rank) const;

 private:
  ActionPlace find(const Place& place, int micro_batch,
                   std::initializer_list<ActionKind> kinds) const;
  std::vector<ActionPlace> replicas(int rank, int index) const;
  const Schedule& schedule_;
  /// By rank, chunk, micro-batch and kind: the first such action's index.
  std::vector<std::vector<int>> index_;
  std::vector<std::vector<int>> stages_;  ///< by rank and chunk; -1: none
  /// By rank and chunk: the updates' indices.
  std::vector<std::vector<std::vector<int>>> updates_;
  std::vector<std::vector<Place>> owners_;  ///< by stage
};

/// For schedules with updates in their lists: the version of the weights that
/// each forward reads; version n has had n updates. Keeps a reference to the
/// schedule, whose routes must be sound; its actions need not be.
class ReadVersions {
 public:
  explicit ReadVersions(const Schedule& schedule);
  /// 0 if the schedule flushes.
  int of(int stage, int micro_batch) const;
  /// Micro-batches whose gradients are in one update of a stage.
  int micro_batches_per_update(int stage) const;

 private:
  const Schedule& schedule_;
  std::vector<int> replicas_;             ///< by stage
  std::vector<std::vector<int>> newest_;  ///< by stage and micro-batch
};

}  // namespace shardbook::pipeline
