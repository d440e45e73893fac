#include "sim/world.h"

#include <map>
#include <memory>
#include <numeric>
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
  std::vector<bool> is_special(static_cast<std::size_t>(world_size), false);
  for (const Fault& fault : cluster.faults) {
    if (fault.rank < world_size) {
      is_special[static_cast<std::size_t>(fault.rank)] = true;
    }
  }
  for (int r = 0; r < world_size; ++r) {
    const bool stands_alone = !options.fold_class || cluster.jitter > 0 ||
                              is_special[static_cast<std::size_t>(r)];
    int place = static_cast<int>(result.running.size());
    if (!stands_alone) {
      place = first_of.emplace(options.fold_class(r), place).first->second;
    }
    if (place == static_cast<int>(result.running.size())) {
      result.running.push_back(r);
    }
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
        const NetworkScope attached(network.get(), running.rank(),
                                    &scope.clock());
        // The group does not own what is on this stack.
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
