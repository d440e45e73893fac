#include "comm/launch.h"

#include "comm/gloo/gloo_group.h"
#include "comm/threads/thread_group.h"
#include "core/check.h"

namespace shardbook {

void run_ranks(int world_size, const std::function<void(ProcessGroup&)>& body,
               const LaunchOptions& options) {
  SB_CHECK(world_size >= 1 && world_size <= 4096, "world size ", world_size,
           ": give 1 to 4096 ranks");
  SB_CHECK(options.timeout.count() > 0, "timeout ", options.timeout.count(),
           " ms: give more than 0");
  if (options.backend == "threads") {
    internal::run_thread_ranks(world_size, body, options);
  } else if (options.backend == "gloo") {
    internal::run_gloo_ranks(world_size, body, options);
  } else {
    SB_FAIL("backend '", options.backend, "' is unknown; give threads or gloo");
  }
}

}  // namespace shardbook
