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

/// A rank was lost or late, or its call differs from its peers' call.
class RunError : public Error {
 public:
  using Error::Error;
};

/// The ranks that met were started with different options.
class OptionsDiffer : public Error {
 public:
  using Error::Error;
};

/// Exit status of a program that refuses its options, in one sentence.
constexpr int kExitBadInput = 2;
/// Exit status of a run that failed: a rank was lost or late, a disk is full.
constexpr int kExitRunFailed = 3;

struct LaunchOptions {
  std::string backend = "threads";  ///< "threads", "gloo" or "nccl"
  /// "cpu" or "cuda"; empty: "cuda" for nccl, "cpu" for the others. On CUDA,
  /// local rank r has GPU r % n of n. Where several ranks share a GPU (backend
  /// threads only), each has its part of the memory.
  std::string device;
  /// How long a call waits for its peers before it names the missing ranks.
  std::chrono::milliseconds timeout{std::chrono::minutes(5)};
  /// Capacity of each rank's device; 0: no limit.
  std::int64_t device_memory_bytes = 0;
  bool deterministic = false;
  /// threads: a send, however small, is complete when its receiver has the
  /// message. Finds programs that work only while small messages are buffered.
  bool rendezvous_sends = false;
  /// gloo, nccl: where the ranks meet: "tcp:HOST:PORT" (served by rank 0),
  /// "file:FOLDER" (shared by all hosts) or "redis:HOST:PORT[/JOB]". Until all
  /// have come, rank 0 listens on all addresses of its host. Empty: the
  /// environment decides (comm/processes.h), or else run_ranks.
  std::string rendezvous;
  /// gloo, nccl: network interface of this host, such as "eth0". Empty: the one that
  /// reaches the rendezvous, which is loopback on a single host. With a name,
  /// rank 0 listens on one address only.
  std::string network_interface;
  /// gloo, nccl: names and values that every rank must share. Ranks compare them when
  /// they meet, and throw OptionsDiffer.
  std::vector<std::pair<std::string, std::string>> agreed;
};

/// Runs `body` once per rank and returns when all have ended. Each rank has a
/// RankContext on its own device "cpu:r", or its part of a GPU, and its share
/// of the cores.
///
/// "threads": ranks are threads of this process. When a rank throws, the first
/// cause is rethrown, and the others stop with "rank r failed: ...".
///
/// "gloo": ranks are processes. Where this process is a rank already (started
/// by launch_processes, torchrun, mpirun or srun) `body` runs once, as that
/// rank. Elsewhere the ranks are forked and end with `body`: what it writes to
/// captured variables is lost; comm/processes.h has ways to return it.
///
/// "nccl": each rank has a GPU of its own. Where this process is a rank already
/// `body` runs once, as that rank. Elsewhere the ranks are threads.
void run_ranks(int world_size, const std::function<void(ProcessGroup&)>& body,
               const LaunchOptions& options = {});

/// Throws Error, in one sentence, where run_ranks could not start these ranks:
/// an unknown backend, a device that the backend cannot serve, too few GPUs;
/// gloo, nccl: a rendezvous, an interface or a launcher's variable that makes
/// no sense, or another number of ranks than the launcher's. run_ranks calls
/// it; a program that starts processes calls it first.
void check_launch(int world_size, const LaunchOptions& options);

}  // namespace shardbook
