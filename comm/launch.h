#pragma once

// Starting ranks.

#include <chrono>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "comm/process_group.h"
#include "core/check.h"

namespace shardbook {

/// A rank was lost, came too late, or made another call than its peers.
class RunError : public Error {
 public:
  using Error::Error;
};

/// The ranks that met were started with different options.
class OptionsDiffer : public Error {
 public:
  using Error::Error;
};

struct LaunchOptions {
  std::string backend = "threads";  ///< "threads" or "gloo"
  /// How long a call waits for its peers before it names the missing ranks.
  std::chrono::milliseconds timeout{std::chrono::minutes(5)};
  /// Capacity of each rank's device; 0: no limit.
  std::int64_t device_memory_bytes = 0;
  bool deterministic = false;
  /// gloo: where the ranks meet: "tcp:HOST:PORT" (served by rank 0),
  /// "file:FOLDER" (shared by all hosts) or "redis:HOST:PORT[/JOB]". Empty: the
  /// environment decides (comm/processes.h), or else run_ranks.
  std::string rendezvous;
  /// gloo: network interface of this host, such as "eth0". Empty: the one that
  /// reaches the rendezvous, which is loopback on a single host.
  std::string network_interface;
  /// gloo: names and values that every rank must share. Ranks compare them when
  /// they meet, and throw OptionsDiffer.
  std::vector<std::pair<std::string, std::string>> agreed;
};

/// Runs `body` once per rank, each with a RankContext on its own device "cpu:r"
/// and the cores of the machine divided among the ranks, and returns when all
/// ended.
///
/// "threads": ranks are threads of this process. The first cause is thrown
/// again when a rank threw; the others stop with "rank r failed: ...".
///
/// "gloo": ranks are processes. Where this process is a rank already (started
/// by launch_processes, torchrun, mpirun or srun) `body` runs once, as that
/// rank. Elsewhere the ranks are forked and end with `body`: what it writes to
/// captured variables is lost; comm/processes.h has ways to bring it home.
void run_ranks(int world_size, const std::function<void(ProcessGroup&)>& body,
               const LaunchOptions& options = {});

}  // namespace shardbook
