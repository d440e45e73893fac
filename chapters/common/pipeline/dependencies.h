#pragma once

// The actions that each action of a schedule waits for.

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

/// The stage at each chunk of each rank; -1 where there is none.
std::vector<std::vector<int>> stages_by_chunk(const Schedule& schedule);

/// The actions that an action waits for, on its own rank and on others.
/// Replicas of a stage update together: each waits until the others reach their
/// update.
class Dependencies {
 public:
  /// Keeps a reference. Cost: one slot per action kind, chunk and micro-batch.
  explicit Dependencies(const Schedule& schedule);
  /// Of `rank`'s action at `index`, whose chunk and micro-batch are in range.
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

}  // namespace shardbook::pipeline
