#pragma once

// What run_ranks can start: a file for each backend, chosen by the build.

#include <functional>

#include "comm/launch.h"

namespace shardbook::internal {

struct Backend {
  const char* name;
  /// As check_launch; the options of all backends are checked already.
  void (*check)(int world_size, const LaunchOptions& options);
  /// As run_ranks.
  void (*run)(int world_size, const std::function<void(ProcessGroup&)>& body,
              const LaunchOptions& options);
};

extern const Backend kThreads;  ///< threads/thread_group.cpp
extern const Backend kGloo;     ///< gloo/gloo_group.cpp or no_gloo.cpp
extern const Backend kNccl;     ///< nccl/nccl_ranks.cpp

}  // namespace shardbook::internal
