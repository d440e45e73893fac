#pragma once

// One device that computes what an asynchronous pipeline computes.
//
// There is no pipeline here, only the rule of versions: micro-batch b passes
// the stages one after another. Stage s uses the weights that it had after
// version(s, b) updates, and applies the gradient to its newest weights.

#include <functional>
#include <vector>

#include "chapters/common/pipeline/stages.h"
#include "chapters/common/run/training.h"

namespace shardbook::pipeline {

struct SequentialRule {
  std::vector<int> cuts;
  /// Version that micro-batch b reads at stage s.
  std::function<int(int stage, int micro_batch)> version;
  /// By stage: the number of mini-batches whose mean gradient is one update.
  std::vector<int> replicas;
};

/// PipeDream: max(0, b - (p-1-s)). Narayanan et al. 2019, section 3.3. If stage
/// s has R replicas and the later stages are on n ranks, an update has R
/// mini-batches and a replica runs ceil(n/R) forwards ahead, so the version is
/// max(0, b div R - ceil(n/R)).
int pipedream_version(int micro_batch, int stage,
                      const std::vector<int>& replicas);
/// With vertical sync: max(0, b - (p-1)) at every stage. With replicas: this
/// stage's newest version with no mini-batch that stage 0's version lacks.
int vertical_sync_version(int micro_batch, int stage,
                          const std::vector<int>& replicas);
/// 2BW, m micro-batches in a batch: max(0, b/m - 1). Narayanan et al. 2021,
/// section 3.1.
int double_buffered_version(int micro_batch, int micro_batches);

/// Trains options.steps batches, in these pieces. Parameters have their names
/// in the whole model; there is one loss per step.
ReferenceRun train_sequentially(const Options& options, const LayerList& layers,
                                const SequentialRule& rule,
                                const std::vector<MicroBatch>& pieces,
                                const Dataset& data);

}  // namespace shardbook::pipeline
