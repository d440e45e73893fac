// This build has no Gloo.

#include "comm/gloo/gloo_group.h"
#include "comm/internal/backends.h"
#include "core/check.h"

namespace shardbook::internal {

bool has_gloo() { return false; }

void check_gloo() {
  SB_FAIL(
      "backend gloo: this build has no Gloo; install libgloo-dev and build "
      "again, or use --backend threads");
}

void run_as_rank(const RankEnvironment&,
                 const std::function<void(ProcessGroup&)>&,
                 const LaunchOptions&) {
  check_gloo();
}

const Backend kGloo{"gloo", [](int, const LaunchOptions&) { check_gloo(); },
                    [](int, const std::function<void(ProcessGroup&)>&,
                       const LaunchOptions&) {}};

}  // namespace shardbook::internal
