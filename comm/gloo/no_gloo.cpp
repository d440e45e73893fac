// Stands in for gloo_group.cpp where libgloo is not installed.

#include "comm/gloo/gloo_group.h"
#include "core/check.h"

namespace shardbook::internal {

bool has_gloo() { return false; }

void run_gloo_ranks(int, const std::function<void(ProcessGroup&)>&,
                    const LaunchOptions&) {
  SB_FAIL("backend 'gloo' is not in this build: install libgloo-dev and "
          "configure again, or give the backend 'threads'");
}

}  // namespace shardbook::internal
