// This build has no Gloo.

#include "comm/gloo/gloo_group.h"
#include "core/check.h"

namespace shardbook::internal {
namespace {

[[noreturn]] void no_gloo() {
  SB_FAIL(
      "backend gloo: this build has no Gloo; install libgloo-dev and build "
      "again, or use --backend threads");
}

}  // namespace

bool has_gloo() { return false; }

void run_as_rank(const RankEnvironment&,
                 const std::function<void(ProcessGroup&)>&,
                 const LaunchOptions&) {
  no_gloo();
}

void run_gloo_ranks(int, const std::function<void(ProcessGroup&)>&,
                    const LaunchOptions&) {
  no_gloo();
}

void check_gloo() { no_gloo(); }

}  // namespace shardbook::internal
