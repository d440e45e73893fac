#pragma once

// How the ranks of a world come together, before any data move.

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "comm/launch.h"
#include "comm/processes.h"
#include "comm/processes/control_line.h"
#include "comm/processes/rendezvous.h"

namespace shardbook::internal {

/// A line to the coordinator, once all ranks have come. Missing ranks are named
/// after the timeout. Throws OptionsDiffer, on all ranks, where
/// LaunchOptions::agreed differs.
std::unique_ptr<ControlLine> join_world(const Rendezvous& rendezvous,
                                        const RankEnvironment& environment,
                                        std::uint64_t generation,
                                        const LaunchOptions& options);

/// "joining the world of 4".
std::string joining_text(int world_size);

/// Returns when all ranks have called it with this key.
void wait_for_all(ControlLine& line, const std::string& key, int world_size,
                  std::chrono::milliseconds timeout);

}  // namespace shardbook::internal
