#pragma once

// ZeRO-2 and -3 of the hybrid chapter, run by itself on shapes for a model of few
// blocks. A model of more blocks, and a step of more micro-batches, add equally
// much for each.

#include <array>

#include "chapters/planner/step.h"
#include "core/device.h"

namespace shardbook::planner {

/// Bytes by MemoryKind.
using BytesByKind = std::array<double, kNumMemoryKinds>;

struct ZeroRun {
  double step_s = 0;
  /// Of a micro-batch its forward, and all of it.
  double forward_s = 0, each_s = 0;
  BytesByKind peak{};  ///< at the fullest moment
};

/// Stages 2 and 3 without offload. Throws Error where the chapter refuses the job.
/// Cost: two steps of a few blocks, and of one more, once for all jobs that differ in
/// blocks and micro-batches alone.
ZeroRun zero_run(const HybridJob& job);

}  // namespace shardbook::planner
