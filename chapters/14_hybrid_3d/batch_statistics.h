#pragma once

// Running statistics of batch norms, where replicas see different images: a
// stage adds up the values of a step's micro-batches and their squares. At the
// end of the step replicas add theirs, and all update once, from all images, so
// every replica has the same bits.

#include <vector>

#include "chapters/common/pipeline/pipeline_model.h"
#include "comm/process_group.h"
#include "core/module.h"

namespace shardbook::hybrid {

/// Updates the running statistics of this rank's stages from the micro-batches
/// of all ranks of `replicas`, which hold the same stages and have run equally
/// many equal micro-batches. In a schedule of two directions the two ranks of a
/// stage add up theirs as well. One all-reduce of 16 bytes per channel for each
/// of the two groups; nothing for models without batch norms. Collective.
void commit_statistics(PipelineModel& model, ProcessGroup& replicas);
/// Bytes that this rank sends in one call.
double statistics_bytes(PipelineModel& model, const ProcessGroup& replicas);

/// The running statistics of this rank's stages.
std::vector<NamedTensor> running_statistics(PipelineModel& model);

}  // namespace shardbook::hybrid
