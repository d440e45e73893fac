// The algorithms of collectives, messages and copies, and the bytes that pass
// through the links. internal/message_timer.cpp times them.

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>

#include "core/check.h"
#include "sim/cost_model.h"
#include "sim/internal/message_timer.h"
#include "sim/rings.h"

namespace shardbook::sim {

using internal::Group;
using internal::kMeasuredBytes;
using internal::make_group;
using internal::MessageTimer;

namespace {

/// Messages of one rank that are under way at a time.
constexpr double kMessagesAtOnce = 8;

/// Speed of the direct way between two devices of a node.
double pair_speed(const Cluster& cluster, int a, int b) {
  if (cluster.mesh.empty()) return cluster.intra_node.speed();
  for (const MeshLink& link : cluster.mesh) {
    if (std::minmax(link.a, link.b) == std::minmax(a, b)) {
      return link.count * cluster.intra_node.speed();
    }
  }
  return cluster.host_link.speed();
}

/// Time in which a member sends `bytes` to each other member: bytes that leave
/// the node use its share of the NICs, while the others move inside the node.
double exchange_seconds(const Cluster& cluster, const Group& group,
                        double bytes) {
  const double outside =
      (group.size - group.members) * bytes /
      std::max(group.net_speed / std::max(group.fewest, 1.0), 1.0);
  double inside = (group.members - 1) * bytes / cluster.intra_node.speed();
  if (!cluster.mesh.empty()) {
    // Each pair has its own links; pairs without one share the way over PCIe.
    inside = 0;
    for (const int a : group.devices) {
      double over_pcie = 0;
      for (const int b : group.devices) {
        if (a == b) continue;
        const double speed = pair_speed(cluster, a, b);
        if (speed == cluster.host_link.speed()) {
          over_pcie += bytes / speed;
        } else {
          inside = std::max(inside, bytes / speed);
        }
      }
      inside = std::max(inside, over_pcie);
    }
  }
  return std::max(inside, group.nodes > 1 ? outside : 0);
}

Cost all_reduce(const MessageTimer& timer, const Cluster& cluster,
                const Group& group, double bytes) {
  const double steps = 2 * (group.size - 1);
  const double net_steps = 2 * (group.nodes - 1);
  Cost best =
      timer.ring(steps, net_steps, bytes, steps + cluster.intra_node.last_step);
  auto offer = [&](const Cost& other) {
    if (other.seconds < best.seconds) best = other;
  };
  if (group.nodes > 1) offer(timer.tree(bytes));
  // With two members there is nothing that a switch could save.
  if (cluster.intra_node.reduction_bytes_per_s > 0 && group.fewest > 2) {
    offer(timer.in_switch(bytes));
  }
  return best;
}

/// A flat network: each device has its own line to a switch that is never busy,
/// and each algorithm takes as long as in textbooks: latency * steps + bytes /
/// bandwidth. The collectives are those of Chan et al. 2007 (Collective
/// communication: theory, practice, and experience), sections 3 to 5: rings,
/// and trees that halve the members.
Cost on_flat_network(const LinkSpec& link, CommOp op, double bytes, double n) {
  double steps = n - 1, share = (n - 1) / n;
  switch (op) {
    case CommOp::kAllReduce:
      steps *= 2;
      share *= 2;
      break;
    case CommOp::kBarrier:
      steps *= 2;
      share = 0;
      break;
    case CommOp::kBroadcast:
    case CommOp::kReduce:
      steps = share = std::ceil(std::log2(n));
      break;
    case CommOp::kSend:
    case CommOp::kRecv:
      steps = share = 1;
      break;
    default:  // a part of the bytes to or from each other member
      break;
  }
  return {steps * link.latency_s + share * bytes / link.speed(), link.trust,
          "flat"};
}

bool is_flat(const Cluster& cluster) {
  return cluster.intra_node.name == "flat";
}

}  // namespace

/// Rings already searched for, by the devices of the group.
struct RingCache {
  std::mutex mutex;
  std::map<std::vector<int>, int> rings;
};

CostModel::CostModel(Cluster cluster)
    : cluster_(std::move(cluster)), rings_(std::make_shared<RingCache>()) {}

int CostModel::rings_among(const std::vector<int>& devices) const {
  const std::lock_guard<std::mutex> lock(rings_->mutex);
  const auto [found, is_new] = rings_->rings.try_emplace(devices);
  if (is_new) found->second = num_rings(cluster_.mesh, devices);
  return found->second;
}

Cost CostModel::collective(CommOp op, double bytes,
                           const std::vector<int>& ranks) const {
  Group group = make_group(cluster_, ranks);
  if (group.size <= 1) return {};
  if (op == CommOp::kSend || op == CommOp::kRecv) {
    return message(bytes, ranks[0], ranks[1]);
  }
  if (is_flat(cluster_)) {
    return on_flat_network(cluster_.intra_node, op, bytes, group.size);
  }
  if (cluster_.shares_memory) {
    // An all-reduce was measured; the others touch each byte half as often.
    const double passes = op == CommOp::kAllReduce ? 1 : 0.5;
    return {cluster_.intra_node.latency_s +
                passes * bytes / cluster_.intra_node.speed(),
            cluster_.intra_node.trust, "memory"};
  }
  group.nvlink = cluster_.intra_node.name == "nvlink";
  group.node_speed = cluster_.intra_node.speed();
  if (!cluster_.mesh.empty() && group.members > 1) {
    const int rings = rings_among(group.devices);
    group.nvlink = rings > 0;
    group.node_speed = rings > 0 ? rings * cluster_.intra_node.speed()
                                 : cluster_.host_link.speed();
  }

  const MessageTimer timer(cluster_, group);
  const double others = group.size - 1, other_nodes = group.nodes - 1;
  Cost cost;
  switch (op) {
    case CommOp::kAllReduce:
      cost = all_reduce(timer, cluster_, group, bytes);
      break;
    case CommOp::kBarrier:
      // An all-reduce of one word.
      cost = all_reduce(timer, cluster_, group, 4);
      break;
    case CommOp::kReduceScatter:
    case CommOp::kAllGather:
      cost = timer.ring(others, other_nodes, bytes,
                        others + cluster_.intra_node.last_step / 2);
      if (cluster_.software.member_s > 0) {
        // Slice by slice into (or out of) one tensor: read once, written once.
        cost.seconds += group.size * cluster_.software.member_s +
                        2 * bytes /
                            (cluster_.device.memory_bytes_per_s *
                             cluster_.device.memory_efficiency);
      }
      break;
    case CommOp::kBroadcast:
    case CommOp::kReduce:
      // Pieces follow each other along the ring: all bytes through each link.
      cost = timer.ring(others, other_nodes, bytes, group.size);
      break;
    case CommOp::kScatter:
    case CommOp::kGather:
    case CommOp::kAllToAll:
    case CommOp::kAllToAllV: {
      // Direct messages, some at a time. The busiest rank (for scatter and
      // gather the root) has one for each other member.
      const double piece = bytes / group.size;
      cost = timer.direct(0, 1, group.nodes > 1,
                          std::ceil(others / kMessagesAtOnce));
      cost.transfer_s = exchange_seconds(cluster_, group, piece);
      cost.seconds += cost.transfer_s;
      cost.rate = cost.max_rate = 1;
      break;
    }
    default:
      SB_FAIL("cost of ", comm_op_name(op), ": no such collective");
  }

  const double lines = group.nodes > 1 ? group.fewest : 1;
  cost.rate *= group.ring_speed() / lines;
  cost.max_rate *= group.ring_speed(group.lone_net_speed) / lines;
  const LinkSpec& bound = link(ranks);
  cost.trust = bound.trust;
  if (group.size > bound.measured_ranks) {
    cost.trust = Trust::kExtrapolated;
  } else if (bytes < kMeasuredBytes || op != CommOp::kAllReduce) {
    cost.trust = std::max(cost.trust, Trust::kInterpolated);
  }
  return cost;
}

Cost CostModel::message(double bytes, int from, int to) const {
  Group group = make_group(cluster_, {from, to});
  if (from == to) return {};
  if (is_flat(cluster_)) {
    return on_flat_network(cluster_.intra_node, CommOp::kSend, bytes, 2);
  }
  if (cluster_.shares_memory) {
    return {0.5 * bytes / cluster_.intra_node.speed(),
            cluster_.intra_node.trust, "memory"};
  }
  group.nvlink = link({from, to}).name == "nvlink";
  const bool between_nodes = group.nodes > 1;
  double speed = cluster_.network.speed() *
                 std::max(1.0, static_cast<double>(cluster_.nics_per_node) /
                                   cluster_.devices_per_node);
  const double lone_speed = speed;
  if (between_nodes) {
    speed = std::min(speed, group.net_speed);
  } else {
    speed = pair_speed(cluster_, from % cluster_.devices_per_node,
                       to % cluster_.devices_per_node);
  }
  Cost cost =
      MessageTimer(cluster_, group).direct(bytes, speed, between_nodes, 1);
  cost.rate *= speed;
  cost.max_rate *= between_nodes ? lone_speed : speed;
  cost.trust = std::max(link({from, to}).trust, Trust::kInterpolated);
  return cost;
}

Cost CostModel::host_copy(double bytes) const {
  const LinkSpec& link = cluster_.host_link;
  return {link.latency_s + bytes / link.speed(), link.trust, "copy"};
}

const LinkSpec& CostModel::link(const std::vector<int>& ranks) const {
  if (ranks.empty()) return cluster_.intra_node;
  std::vector<int> devices;
  for (const int rank : ranks) {
    if (cluster_.node_of(rank) != cluster_.node_of(ranks[0])) {
      return cluster_.network;
    }
    devices.push_back(rank % cluster_.devices_per_node);
  }
  if (cluster_.mesh.empty() || devices.size() < 2) return cluster_.intra_node;
  std::sort(devices.begin(), devices.end());
  return rings_among(devices) > 0 ? cluster_.intra_node : cluster_.host_link;
}

}  // namespace shardbook::sim
