#pragma once

// The time of a step under ZeRO on the cluster `textbook`, as a closed form.

#include "chapters/03_zero_fsdp/zero/zero.h"
#include "chapters/common/run/textbook.h"

namespace shardbook::zero {

/// Time to all-reduce the loss (may overlap the last backward) and the norm.
struct Sums {
  double loss_s = 0, norm_s = 0;
};
/// Seconds of the last of `steps` steps, with micro-steps of `model`. Not
/// predicted under offload, for stages 1 and 2 with several buckets, and if
/// stage 3 keeps only some of its layers.
double step_s(const ZeroOptimizer& zero, const textbook::ModelTimes& model,
              std::int64_t steps, std::int64_t micro_steps, const Sums& sums);
/// Both sums run over the ranks of `zero`.
double step_s(const ZeroOptimizer& zero, const textbook::ModelTimes& model,
              std::int64_t steps, std::int64_t micro_steps);

}  // namespace shardbook::zero
