#pragma once

// The time of a step on the cluster `textbook`, as the page's formulas.

#include <vector>

#include "chapters/14_hybrid_3d/bill.h"
#include "chapters/common/pipeline/replay.h"
#include "chapters/common/run/textbook.h"

namespace shardbook::hybrid {

/// Whether the formulas below hold for the options.
bool has_step_time(const Options& options, const HybridOptions& setup,
                   const pipeline::Schedule& schedule);

/// Seconds of a layer for a micro-batch of this size, messages inside it
/// included.
pipeline::Costs layer_costs(const BillSizes& sizes, int layer);

/// What a rank's update takes, part by part.
struct UpdateTimes {
  double sums = 0;    ///< of gradients over dp x cp, and over tp
  double tied = 0;    ///< of the table over its stages
  double gather = 0;  ///< of ZeRO-1's parameters
};
UpdateTimes update_times(const BillSizes& sizes);

/// From the pipeline's actions and the updates of its ranks. The sum of loss and
/// norm over the world waits for all of them; with ZeRO-1, a rank begins its next
/// step when it has its parameters.
double step_s(const BillSizes& sizes, pipeline::Engine& engine,
              const std::vector<UpdateTimes>& updates);

/// A micro-batch of this size, for ZeRO-2 and -3.
textbook::ModelTimes model_times(const BillSizes& sizes);

}  // namespace shardbook::hybrid
