#pragma once

// Starting ranks.

#include <chrono>
#include <functional>
#include <string>

#include "comm/process_group.h"

namespace shardbook {

struct LaunchOptions {
  std::string backend = "threads";  ///< "threads" or "gloo"
  /// How long a call waits for its peers before it names who is missing.
  std::chrono::milliseconds timeout{std::chrono::minutes(5)};
  /// Capacity of each rank's device; 0: no limit.
  std::int64_t device_memory_bytes = 0;
  bool deterministic = false;
};

/// Runs `body` once per rank, each with a RankContext on its own device "cpu:r"
/// and the cores of the machine divided among the ranks, and returns when all
/// ended.
///
/// "threads": ranks are threads of this process. The first cause is thrown
/// again when a rank threw; the others stop with "rank r failed: ...".
void run_ranks(int world_size, const std::function<void(ProcessGroup&)>& body,
               const LaunchOptions& options = {});

}  // namespace shardbook
