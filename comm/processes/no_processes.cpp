// A build without sockets and processes: ranks are threads, or fibers of sim/.

#include "comm/internal/backends.h"
#include "comm/processes.h"
#include "core/check.h"

namespace shardbook {

std::optional<RankEnvironment> rank_environment() { return {}; }

bool is_first_process() { return true; }

std::optional<int> launch_processes(int world_size,
                                    const LaunchOptions& options) {
  check_launch(world_size, options);
  return {};
}

namespace internal {
namespace {

void refuse(int, const LaunchOptions& options) {
  SB_FAIL("--backend ", options.backend,
          ": this build starts no processes; use --backend threads or sim");
}
void run_none(int, const std::function<void(ProcessGroup&)>&,
              const LaunchOptions&) {}

}  // namespace

const Backend kGloo{"gloo", refuse, run_none};
const Backend kNccl{"nccl", refuse, run_none};

}  // namespace internal
}  // namespace shardbook
