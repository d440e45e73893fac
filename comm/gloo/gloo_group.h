#pragma once

// The gloo backend: ranks are processes, Gloo's TCP transport carries the data.
// Without libgloo no_gloo.cpp answers with an Error that says what to install.

#include <functional>

#include "comm/launch.h"
#include "comm/process_group.h"

namespace shardbook::internal {

/// True when this build has Gloo.
bool has_gloo();

/// run_ranks for backend "gloo". In a process that is a rank it joins the
/// world, runs `body` once, as that rank, and leaves. In any other it forks the
/// ranks (run_processes), so that only what `body` prints or saves remains.
void run_gloo_ranks(int world_size,
                    const std::function<void(ProcessGroup&)>& body,
                    const LaunchOptions& options);

}  // namespace shardbook::internal
