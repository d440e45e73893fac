#pragma once

// Peak memory of a rank that runs its list.
//
// The bytes that each action of a micro-batch needs and leaves are measured
// once, on shapes (stage_memory.h). The list then says which micro-batches are
// kept at the same time:
//
//   peak = max over the actions of (kept by the others + needed by this one)
//
// Messages are no part of the prediction: values that were sent count as
// communication, which has no prediction.

#include <functional>
#include <vector>

#include "chapters/common/pipeline/engine.h"
#include "chapters/common/pipeline/stage_memory.h"
#include "chapters/common/run/report.h"

namespace shardbook::pipeline {

using NeedsOf = std::function<const StageNeeds&(int micro_batch, int chunk)>;

/// Peaks of a rank in one step.
struct RankPeaks {
  double activations = 0, inputs = 0, gradients = 0;
  /// No prediction: a B comes between an I and its W, which is not measured.
  bool is_open = false;
};
RankPeaks rank_peaks(const std::vector<Action>& actions,
                     const NeedsOf& needs_of);

/// The kinds that do not depend on the schedule: parameters (and buffers) and
/// optimizer state of a rank. The other kinds have no prediction here.
MemoryBill stage_bill(const Options& options, const Tensors& parameters,
                      const Tensors& buffers = {});

/// Peak memory of `rank` by kind. There is no prediction of activations and
/// gradients if chunks of the rank share a parameter or hand values to each
/// other, or if there are no steps.
MemoryBill schedule_bill(const Options& options, const Schedule& schedule,
                         int rank, PipelineModel& model, Feed& feed,
                         const EngineOptions& engine = {});

}  // namespace shardbook::pipeline
