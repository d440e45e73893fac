#pragma once

// Thousands of ranks in one thread.
//
// Each rank is a fiber (internal/fiber.h): a function with a stack of its own that
// runs until it must wait for another rank, and then hands the thread on. Ranks
// that may go on wait in a queue, so their order is always the same.
//
//   rank 0   run | all_reduce: wait |                      | run ...
//   rank 1                          | run | all_reduce: ok | run ...
//
// Messages work as on the threads backend: only the way to sleep differs.
// Tensors may be real; in the `sim` world they are on meta devices.

#include <functional>

#include "comm/launch.h"
#include "comm/process_group.h"

namespace shardbook::sim {

/// For waits that are not for messages of other ranks.
class FiberControl {
 public:
  virtual ~FiberControl() = default;
  /// Suspends this rank's running fiber until it is made ready.
  virtual void suspend(int rank) = 0;
  virtual void make_ready(int rank) = 0;
};

struct FiberHooks {
  /// Called before the first rank begins.
  std::function<void(FiberControl&)> begin;
  /// Called when no rank can go on. Returns whether it has made any ready.
  std::function<bool()> when_all_wait;
};

/// Runs `body` once per rank, each as a fiber with a RankContext on its own
/// `meta:r` device (or `cpu:r`), and returns when all have ended. Failures are
/// reported as by run_ranks; ranks that all wait for each other are reported as
/// a deadlock.
void run_fibers(int num_ranks, const std::function<void(ProcessGroup&)>& body,
                const LaunchOptions& options = {}, bool on_meta = true,
                const FiberHooks& hooks = {});

}  // namespace shardbook::sim
