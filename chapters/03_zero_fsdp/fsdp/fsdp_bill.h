#pragma once

// The bytes that FSDP sends and holds, by a walk through a step that does not
// run.

#include <cstdint>
#include <string>
#include <vector>

#include "chapters/03_zero_fsdp/fsdp/fsdp.h"
#include "chapters/common/run/report.h"

namespace shardbook::fsdp {

/// One optimizer step as the trainer runs it.
struct StepPlan {
  std::int64_t steps = 1;
  std::int64_t micro_steps = 1;
  bool no_sync = false;  ///< only the last micro-step reduces
  /// Paths of modules whose forward runs again in backward.
  std::vector<std::string> recomputed;
};

/// Bytes that this rank sends: parameters gathered, gradients reduced, and one
/// norm per step. Every unit runs once per forward.
double predicted_bytes(const FullyShardedDataParallel& fsdp,
                       const StepPlan& plan);

/// Peaks of parameters, gradients and messages on this rank's device, from
/// construction on; `beside` bytes of the caller's own message live through
/// the last backward of a step. Modules run in the order of definition, each
/// once per forward.
MemoryBill predicted_memory(const FullyShardedDataParallel& fsdp,
                            const StepPlan& plan, double beside);

}  // namespace shardbook::fsdp
