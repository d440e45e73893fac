#pragma once

// The memory that a rank of a pipeline holds and the time of a step, as formulas.

#include "chapters/common/pipeline/pipeline_engine.h"
#include "chapters/common/run/report.h"
#include "chapters/common/run/textbook.h"

namespace shardbook::pipeline {

/// Parameters (and buffers), gradients and optimizer state of a rank.
MemoryBill states_bill(const Options& options, PipelineModel& model);

/// The same and the activations kept, for a model with the layers of one
/// device. Schedules that do not flush hold several versions of the parameters.
MemoryBill pipeline_bill(const Options& options, PipelineModel& model,
                         Engine& engine, int rank);

/// Seconds of a decoder's layer: embedding (0), blocks, head (`last`).
Costs layer_costs(const textbook::GptTimes& times, int layer, int last);

/// Seconds of a step on the cluster `textbook`: the longest path through the
/// schedule, then the sums of the tied gradient, the loss and the norm. For
/// whole layers of a decoder without experts, and one rank per stage.
double step_s(const Options& options, PipelineModel& model, Engine& engine);

}  // namespace shardbook::pipeline
