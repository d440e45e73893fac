#pragma once

// The bytes that FSDP sends and holds, and the time of its steps, as formulas.
// ZeRO's are in zero/zero.h and zero/zero_memory.h.

#include <cstdint>

#include "chapters/03_zero_fsdp/fsdp/fsdp.h"
#include "chapters/common/run/report.h"
#include "chapters/common/run/textbook.h"

namespace shardbook::zero_fsdp {

/// One optimizer step as the strategy runs it.
struct StepPlan {
  std::int64_t steps = 1;
  std::int64_t micro_steps = 1;
  bool no_sync = false;  ///< only the last micro-step reduces
};

/// Bytes that this rank sends: parameters gathered, gradients reduced, and one
/// norm per step. Every unit runs once per forward.
double predicted_bytes(const fsdp::FullyShardedDataParallel& fsdp,
                       const StepPlan& plan);

/// Parameters, gradients and optimizer state that this rank's device holds at an
/// update: its shards.
MemoryBill states_bill(const Options& options,
                       const fsdp::FullyShardedDataParallel& fsdp);

/// Seconds of a step on the cluster `textbook`, with micro-batches of `model`;
/// predicted only for one unit, or for equal layers in shards.
double step_s(const fsdp::FullyShardedDataParallel& fsdp, const StepPlan& plan,
              const textbook::ModelTimes& model);

}  // namespace shardbook::zero_fsdp
