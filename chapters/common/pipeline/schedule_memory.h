#pragma once

// What a rank holds while it walks down its list.
//
// A micro-batch is run on shapes once, and its bytes are read off: what F keeps
// for B, what I leaves for W, and how far each of them rises above what it
// found. The list then says which micro-batches are kept at the same time:
//
//   peak = max over the actions of (kept by the others + needed by this one)
//
// so that the prediction knows the schedule, and no messages: values that were
// sent are booked as communication, which is left open.

#include "chapters/common/pipeline/engine.h"
#include "chapters/common/run/report.h"

namespace shardbook::pipeline {

/// Peak memory of `rank` by kind. Activations and gradients are left open where
/// chunks of the rank share a parameter or hand values to each other, and where
/// there are no steps.
MemoryBill schedule_bill(const Options& options, const Schedule& schedule,
                         int rank, PipelineModel& model, Feed& feed);

}  // namespace shardbook::pipeline
