#pragma once

// How the ranks of a world come together, before any data move.

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "comm/launch.h"
#include "comm/processes.h"
#include "comm/processes/control_line.h"
#include "comm/processes/rendezvous.h"

namespace shardbook::internal {

/// This process's rank and its rendezvous, where a launcher started it. Throws
/// Error, which names the option or the variable, where the launcher started
/// another number of ranks or nothing says where they meet.
std::optional<RankEnvironment> launched_rank(int world_size,
                                             const LaunchOptions& options);

/// A line to the coordinator, once all ranks have come. Missing ranks are named
/// after the timeout. Throws OptionsDiffer, on all ranks, where
/// LaunchOptions::agreed differs.
std::unique_ptr<ControlLine> join_world(const Rendezvous& rendezvous,
                                        const RankEnvironment& environment,
                                        std::uint64_t generation,
                                        const LaunchOptions& options);

/// "the rendezvous of 4 ranks".
std::string joining_text(int world_size);

/// Returns when all ranks have called it with this key.
void wait_for_all(ControlLine& line, const std::string& key, int world_size,
                  std::chrono::milliseconds timeout);

}  // namespace shardbook::internal
