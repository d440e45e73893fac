#include "sim/world.h"

#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <vector>

#include "core/check.h"
#include "sim/fiber_world.h"
#include "sim/shared_network.h"
#include "sim/timed_group.h"

namespace shardbook::sim {
namespace {

// Which ranks run (the first of each class), and which of them runs in place of
// each rank.
struct Folding {
  std::vector<int> running;          // world ranks
  std::vector<int> representatives;  // index into `running`, by world rank
};

Folding fold(int world_size, const WorldOptions& options) {
  Folding result;
  std::map<int, int> first_of;
  const Cluster& cluster = options.cost->cluster();
  std::set<int> alone;
  for (const Fault& fault : cluster.faults) alone.insert(fault.rank);
  for (int r = 0; r < world_size; ++r) {
    const int next = static_cast<int>(result.running.size());
    const bool folds =
        options.fold_class && cluster.jitter == 0 && alone.count(r) == 0;
    const int place =
        folds ? first_of.emplace(options.fold_class(r), next).first->second
              : next;
    if (place == next) result.running.push_back(r);
    result.representatives.push_back(place);
  }
  return result;
}

void run_sim(int world_size, const std::function<void(ProcessGroup&)>& body,
             const WorldOptions& options) {
  const Folding folding = fold(world_size, options);
  std::vector<int> ranks(static_cast<std::size_t>(world_size));
  std::iota(ranks.begin(), ranks.end(), 0);
  std::unique_ptr<SharedNetwork> network;
  FiberHooks hooks;
  if (options.shares_links) {
    hooks.begin = [&](FiberControl& fibers) {
      network = std::make_unique<SharedNetwork>(
          *options.cost, fibers, folding.running, folding.representatives);
    };
    hooks.when_all_wait = [&] { return network->advance(); };
  }
  run_fibers(
      static_cast<int>(folding.running.size()),
      [&](ProcessGroup& running) {
        const int rank =
            folding.running[static_cast<std::size_t>(running.rank())];
        RankContext::current().rank = rank;
        ClockScope scope(*options.cost, rank, options.num_recorded_ranks);
        const std::shared_ptr<void> attached =
            network ? network->attach(running.rank(), scope.clock()) : nullptr;
        // The group does not own the objects on this stack.
        const std::shared_ptr<ProcessGroup> inner(&running,
                                                  [](ProcessGroup*) {});
        TimedGroup group(inner, scope.clock(), rank, ranks, "world",
                         folding.representatives, network.get());
        body(group);
      },
      options.launch, /*on_meta=*/true, hooks);
}

}  // namespace

void run_world(int world_size, const std::function<void(ProcessGroup&)>& body,
               const WorldOptions& options) {
  if (options.cost != nullptr) {
    const Cluster& cluster = options.cost->cluster();
    SB_CHECK(world_size <= cluster.num_devices(), "world size ", world_size,
             ": cluster '", cluster.name, "' has ", cluster.num_devices(),
             " devices");
  }
  if (options.launch.backend == "sim") {
    SB_CHECK(options.cost != nullptr, "backend sim: give a cluster");
    run_sim(world_size, body, options);
    return;
  }
  if (options.cost == nullptr) {
    run_ranks(world_size, body, options.launch);
    return;
  }
  run_ranks(
      world_size,
      [&](ProcessGroup& real) {
        ClockScope scope(*options.cost, real.rank(),
                         options.num_recorded_ranks);
        TimedGroup group(real, scope.clock());
        body(group);
      },
      options.launch);
}

}  // namespace shardbook::sim
