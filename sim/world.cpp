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

// Which ranks run (one of each class), and which of them runs in place of each
// rank.
struct Folding {
  std::vector<int> running;          // world ranks
  std::vector<int> representatives;  // index into `running`, by world rank

  // The world ranks that do not run because running[i] does.
  std::vector<int> alike(int i) const {
    std::vector<int> ranks;
    for (int r = 0; r < static_cast<int>(representatives.size()); ++r) {
      const auto at = static_cast<std::size_t>(r);
      if (representatives[at] == i && running[static_cast<std::size_t>(i)] != r)
        ranks.push_back(r);
    }
    return ranks;
  }
};

Folding fold(int world_size, const WorldOptions& options) {
  Folding result;
  std::map<int, int> place_of;  // by class
  const Cluster& cluster = options.cost->cluster();
  std::set<int> alone;
  for (const Fault& fault : cluster.faults) alone.insert(fault.rank);
  for (int r = 0; r < world_size; ++r) {
    const int next = static_cast<int>(result.running.size());
    const bool folds =
        options.fold_class && cluster.jitter == 0 && alone.count(r) == 0;
    const int number = folds ? options.fold_class(r) : r;
    const int place =
        folds ? place_of.emplace(number, next).first->second : next;
    const auto at = static_cast<std::size_t>(place);
    if (place == next) result.running.push_back(r);
    if (folds && number == r) result.running[at] = r;
    result.representatives.push_back(place);
  }
  return result;
}

// Whether the i-th of `count` ranks is among the `most` that are recorded.
bool is_recorded(int i, int count, int most) {
  if (most < 2 || count <= most) return i < most;
  // The j-th of them is rank j * (count - 1) / (most - 1).
  const int j = (i * (most - 1) + count - 2) / (count - 1);
  return j * (count - 1) / (most - 1) == i;
}

void run_sim(int world_size, const std::function<void(ProcessGroup&)>& body,
             const WorldOptions& options) {
  const Folding folding = fold(world_size, options);
  const int num_running = static_cast<int>(folding.running.size());
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
      num_running,
      [&](ProcessGroup& running) {
        const int rank =
            folding.running[static_cast<std::size_t>(running.rank())];
        RankContext::current().rank = rank;
        const bool records = is_recorded(running.rank(), num_running,
                                         options.num_recorded_ranks);
        ClockScope scope(*options.cost, rank, records);
        if (records) {
          scope.clock().main().set_place(world_size,
                                         folding.alike(running.rank()));
        }
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
        ClockScope scope(
            *options.cost, real.rank(),
            is_recorded(real.rank(), real.size(), options.num_recorded_ranks));
        scope.clock().main().set_place(real.size(), {});
        TimedGroup group(real, scope.clock());
        body(group);
      },
      options.launch);
}

}  // namespace shardbook::sim
