#pragma once

// One training step under DataParallel.

#include <cstdint>

#include "chapters/01_data_parallel/data_parallel.h"
#include "chapters/common/data.h"
#include "chapters/common/training.h"

namespace shardbook::data_parallel {

/// Forward, loss, backward and update on global batch `step`; parameters, loss
/// and optimizer live on the main device.
StepResult train_step(const Options& options, DataParallel& model,
                      Optimizer& optimizer, const Dataset& data,
                      std::int64_t step);

}  // namespace shardbook::data_parallel
