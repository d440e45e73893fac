#pragma once

// Running statistics of batch norms, where replicas see different images.
//
// A batch norm divides each micro-batch by its own statistics. They depend on no
// other micro-batch and on no other rank, so losses and gradients on a mesh
// equal one device's for the same micro-batches one by one. The running
// statistics are another matter: evaluation reads them, and a replica has seen
// its own images alone. There are three ways to go on:
//
//   each keeps its own        the replicas drift apart, and what is saved depends
//                             on who saves it
//   the first replica's win   DistributedDataParallel sends them to the others
//                             before each forward: 1/d of the images count
//   the sums of all           here: each replica has the same bits, and one device
//                             has the same numbers
//
// A stage adds up the values of a step's micro-batches and their squares. At the
// end of the step replicas add theirs, and all update once, from all images.

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
