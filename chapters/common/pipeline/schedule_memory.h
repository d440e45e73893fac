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
//
// Stages of one rank have more in common. A value that one hands to the next is
// there from F of the first until both have let it go, and counts once; its
// gradient is there from B of the second to B of the first. A parameter of both
// has one gradient: the first B makes it, and the others add to it.

#include <functional>
#include <vector>

#include "chapters/common/pipeline/engine.h"
#include "chapters/common/pipeline/stage_memory.h"
#include "chapters/common/run/report.h"

namespace shardbook::pipeline {

using NeedsOf =
    std::function<ActionBytes(const Action& action, const ActionState& state)>;

/// Bytes of each parameter of a rank, and which of them its chunks have.
struct RankParameters {
  std::vector<double> bytes;
  std::vector<std::vector<std::size_t>> of_chunk;
};

/// Peaks of a rank in a step, as its list says.
struct RankPeaks {
  double activations = 0, inputs = 0, gradients = 0;
};
RankPeaks rank_peaks(const Schedule& schedule, int rank,
                     const RankParameters& parameters, const NeedsOf& needs_of);

/// What does not depend on the schedule, exactly: parameters (and buffers) and
/// optimizer state of a rank. The other kinds are left open.
MemoryBill stage_bill(const Options& options, const Tensors& parameters,
                      const Tensors& buffers = {});

/// Peak memory of `rank` by kind; communication is left open. `stashes` false:
/// backwards that read other weights than their forward did are compared with
/// their gradient (weight_stash.h). Throws Error where stages of the rank hand
/// several values to each other.
MemoryBill schedule_bill(const Options& options, const Schedule& schedule,
                         int rank, PipelineModel& model, Feed& feed,
                         const EngineOptions& engine = {}, bool stashes = true);

}  // namespace shardbook::pipeline
