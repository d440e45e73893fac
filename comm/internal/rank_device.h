#pragma once

// The cores and the device of a rank, and the reason why it failed.

#include <string>

#include "comm/launch.h"
#include "core/device.h"

namespace shardbook::internal {

/// Cores that this process may run on (its affinity mask, not the machine).
int available_cores();

/// The text of the exception that is being handled.
std::string current_reason();

/// Throws Error with the reason where there is no GPU.
void check_gpus();

/// The device of a rank that is number `local_rank` of `num_local` on this
/// machine. Ranks that share a GPU each have an equal part of its memory, less
/// what CUDA itself needs, where the options give no size.
Device rank_device(int rank, int local_rank, int num_local, bool on_cuda,
                   const LaunchOptions& options);

}  // namespace shardbook::internal
