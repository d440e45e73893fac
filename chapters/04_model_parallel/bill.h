#pragma once

// The cost of a step for each device, by formula.

#include <vector>

#include "chapters/04_model_parallel/model_parallel_strategy.h"
#include "chapters/common/run/report.h"

namespace shardbook::model_parallel {

/// Elements that cross the boundary for one sample.
double boundary_numel(const Options& options, const LayerList& layers, int cut);

/// Bytes that each device sends in one step: the first sends its activations
/// and the labels, the second sends the gradients of these activations.
std::vector<double> step_traffic(const Options& options,
                                 const Settings& settings,
                                 ModelParallelStrategy& strategy);

/// Bytes that each device holds: its own parameters, gradients and optimizer
/// state, and the activations that its layers keep of all splits.
std::vector<MemoryBill> memory_bills(const Options& options,
                                     const Settings& settings,
                                     ModelParallelStrategy& strategy);

/// Seconds of a step on the cluster `textbook`: the products of each half, and
/// its copies. Not predicted for a GPT, and for splits of unequal size.
double step_s(const Options& options, const Settings& settings,
              ModelParallelStrategy& strategy);

}  // namespace shardbook::model_parallel
