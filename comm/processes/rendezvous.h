#pragma once

// How the ranks of a world find their coordinator and come together, before any
// data move.
//
//   tcp:HOST:PORT             rank 0 serves there
//   file:FOLDER               rank 0 writes its addresses into a shared folder
//   redis:HOST:PORT[/JOB]     the same, in a Redis server (Gloo's store)
//
// Until all ranks have come, rank 0 listens on all addresses of its host: other
// hosts may know it by another name than its own. It listens on one address
// where LaunchOptions::network_interface names a network, and where the launcher
// says that all ranks share the host.

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "comm/launch.h"
#include "comm/processes.h"
#include "comm/processes/control_line.h"
#include "comm/processes/coordinator.h"

namespace shardbook::internal {

/// A rank keeps this for the life of the world, to meet the others.
struct Rendezvous {
  /// Serves the world; in rank 0 only, and not where the launcher does.
  std::unique_ptr<Coordinator> coordinator;
  /// As ControlLine::Options::locate.
  std::function<ServingPlace()> locate;
  std::string coordinator_name = "rank 0";
  /// Removes the addresses that rank 0 has published.
  std::shared_ptr<void> publication;
};

/// Throws Error, a sentence about `subject`, when a rendezvous cannot be
/// understood.
void check_rendezvous(const std::string& subject, const std::string& text);

/// Throws Error when the address cannot be understood or served.
Rendezvous make_rendezvous(const RankEnvironment& environment,
                           std::uint64_t generation,
                           const LaunchOptions& options);

/// A place in a Redis server for one short text.
struct RedisPlace {
  /// Throws Error where the key is taken.
  std::function<void(const std::string& value)> set;
  std::function<std::optional<std::string>()> get;
};
/// Without Redis support in this build it throws Error.
RedisPlace make_redis_place(const HostPort& server, const std::string& key);

/// This process's rank and its rendezvous, where a launcher started it. Throws
/// Error, which names the option or the variable, where the launcher started
/// another number of ranks or nothing says where they meet.
std::optional<RankEnvironment> launched_rank(int world_size,
                                             const LaunchOptions& options);

/// What check_launch asks of ranks that may be processes: a rendezvous, an
/// interface and a launcher's variables that make sense.
void check_processes(int world_size, const LaunchOptions& options);

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
