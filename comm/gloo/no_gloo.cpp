// This build has no Gloo: ranks are threads only.

#include "comm/gloo/gloo_group.h"
#include "comm/processes.h"
#include "core/check.h"

namespace shardbook {
namespace {

[[noreturn]] void no_gloo() {
  SB_FAIL(
      "backend gloo: this build has no Gloo; install libgloo-dev and build "
      "again, or use --backend threads");
}

}  // namespace

std::optional<int> launch_processes(int, const LaunchOptions&) { no_gloo(); }

std::vector<std::string> run_processes(
    int, const std::function<std::string(ProcessGroup&)>&,
    const LaunchOptions&) {
  no_gloo();
}

namespace internal {

bool has_gloo() { return false; }

void run_gloo_ranks(int, const std::function<void(ProcessGroup&)>&,
                    const LaunchOptions&) {
  no_gloo();
}

}  // namespace internal
}  // namespace shardbook
