#pragma once

// The worlds of the book, with time.
//
//   backend    ranks       tensors  virtual time
//   threads    threads     real     where a cluster is given
//   gloo       processes   real     where a cluster is given
//   sim        fibers      shapes   always
//
// `body` is the same in all of them. Inside it, VirtualClock::current() is the
// rank's clock, or null where none is kept.

#include <functional>
#include <memory>

#include "comm/launch.h"
#include "sim/cost_model.h"
#include "sim/virtual_clock.h"

namespace shardbook::sim {

struct WorldOptions {
  LaunchOptions launch;
  /// Null: no virtual time (not for `sim`).
  std::shared_ptr<const CostModel> cost;
  /// sim: ranks for which `fold_class` gives the same number do the same, and
  /// only one of each class runs: the rank of that number if it is in the class,
  /// else the first. Empty: all ranks run. Ranks with faults in the cluster
  /// always run.
  std::function<int(int rank)> fold_class;
  /// sim: messages under way at one time share links (sim/shared_network.h).
  /// false, and in worlds with data: each is priced alone.
  bool shares_links = true;
  /// Events and memory samples are kept on this many of the ranks that run: the
  /// first, the last, and some evenly between them.
  int num_recorded_ranks = 8;
};

/// Runs `body` once per rank (sim: once per rank that runs). Throws Error when
/// the cluster has fewer devices than ranks.
void run_world(int world_size, const std::function<void(ProcessGroup&)>& body,
               const WorldOptions& options);

}  // namespace shardbook::sim
