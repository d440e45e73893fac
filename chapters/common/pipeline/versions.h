#pragma once

// Which version of its weights a stage reads, in schedules with updates in
// their lists. Version n has had n updates.

#include <vector>

#include "chapters/common/pipeline/schedule.h"

namespace shardbook::pipeline {

/// The version that each stage's forward of each micro-batch in the lists
/// reads. Keeps a reference to the schedule, whose routes must be sound; its
/// actions need not be.
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
