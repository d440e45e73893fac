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

/// The device of rank `local_rank` of the `num_local` ranks on this machine. If
/// the options give no size, ranks that share a GPU divide its memory equally,
/// after setting aside what CUDA itself needs.
Device rank_device(int rank, int local_rank, int num_local, bool on_cuda,
                   const LaunchOptions& options);

}  // namespace shardbook::internal
