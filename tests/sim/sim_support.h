#pragma once

// A cluster with simple figures, and bodies for its ranks.

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "core/check.h"
#include "core/ops.h"
#include "sim/virtual_clock.h"
#include "sim/world.h"
#include "tests/support/dtypes.h"

namespace shardbook::test {

/// 8 devices in 2 nodes; operations that take bytes / 1 GB/s and at least
/// 1 us; issuing one takes `launch_s`.
inline sim::Cluster plain_cluster(double launch_s = 0) {
  sim::Cluster cluster;
  cluster.name = "plain";
  cluster.num_nodes = 2;
  cluster.devices_per_node = 4;
  cluster.device.name = "plain";
  for (const DType dtype : kAllDTypes) {
    cluster.device.peak_flops[dtype] = 1e12;
  }
  cluster.device.memory_bytes_per_s = 1e9;
  cluster.device.launch_s = launch_s;
  cluster.device.kernel_s = 1e-6;
  cluster.host = cluster.device;
  cluster.host.name = "host";
  cluster.intra_node = {"nvlink", 1e-6, 1e9};
  cluster.network = {"network", 5e-6, 1e8};
  cluster.host_link = {"pcie", 1e-6, 1e8};
  return cluster;
}

inline sim::WorldOptions plain_world(const std::string& backend,
                                     const sim::Cluster& cluster) {
  sim::WorldOptions options;
  options.launch.backend = backend;
  options.cost = std::make_shared<sim::CostModel>(cluster);
  return options;
}

/// An operation of this duration on that cluster.
inline void compute_for(int microseconds) {
  Tensor::empty({250 * microseconds}).zero();
}

/// Runs `body` as one step, and returns the timelines of the ranks that ran.
inline std::map<int, sim::RankTimeline> timelines(
    int world_size, const sim::WorldOptions& options,
    const std::function<void(ProcessGroup&)>& body) {
  std::mutex mutex;
  std::map<int, sim::RankTimeline> result;
  sim::run_world(
      world_size,
      [&](ProcessGroup& world) {
        sim::VirtualClock::current()->begin_steps();
        body(world);
        sim::VirtualClock::current()->end_step();
        const std::lock_guard<std::mutex> lock(mutex);
        result[world.rank()] = sim::VirtualClock::current()->main().timeline();
      },
      options);
  return result;
}

/// The first event with this name and, if given, this label.
inline const sim::TimelineEvent& find_event(const sim::RankTimeline& timeline,
                                            const std::string& name,
                                            const std::string& label = "") {
  const auto found = std::find_if(
      timeline.events.begin(), timeline.events.end(), [&](const auto& each) {
        return each.name == name && (label.empty() || each.label == label);
      });
  SB_CHECK(found != timeline.events.end(), "no ", name, " ", label);
  return *found;
}

inline double duration_s(const sim::TimelineEvent& event) {
  return event.end_s - event.begin_s;
}

}  // namespace shardbook::test
