#pragma once

// What a rank holds while it walks down its list.
//
// What each action of a micro-batch needs and leaves is measured once, on
// shapes (stage_memory.h). The list then says which micro-batches are kept at
// the same time:
//
//   peak = max over the actions of (kept by the others + needed by this one)
//
// so that the prediction knows the schedule, and no messages: values that were
// sent are booked as communication, which is left open.

#include <functional>
#include <vector>

#include "chapters/common/pipeline/engine.h"
#include "chapters/common/pipeline/stage_memory.h"
#include "chapters/common/run/report.h"

namespace shardbook::pipeline {

using NeedsOf = std::function<const StageNeeds&(int micro_batch, int chunk)>;

/// Peaks of a rank that does this in a step.
struct RankPeaks {
  double activations = 0, inputs = 0, gradients = 0;
  /// A B came between an I and its W, which is not among what was measured.
  bool is_open = false;
};
RankPeaks rank_peaks(const std::vector<Action>& actions,
                     const NeedsOf& needs_of);

/// What does not depend on the schedule, exactly: parameters (and buffers) and
/// optimizer state of a rank. The other kinds are left open.
MemoryBill stage_bill(const Options& options, const Tensors& parameters,
                      const Tensors& buffers = {});

/// Peak memory of `rank` by kind. Activations and gradients are left open where
/// chunks of the rank share a parameter or hand values to each other, and where
/// there are no steps.
MemoryBill schedule_bill(const Options& options, const Schedule& schedule,
                         int rank, PipelineModel& model, Feed& feed,
                         const EngineOptions& engine = {});

}  // namespace shardbook::pipeline
