// Collectives, messages and copies.
//
// Constants of NCCL are those of its own model, src/graph/tuning.cc at
// 01afd20 (hwLat, baseLat), which picks algorithm and protocol at run time.

#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "sim/cost_model.h"
#include "sim/internal/ring_cache.h"
#include "sim/rings.h"

namespace shardbook::sim {

namespace {

/// How the bytes of a step are handed over. LL: with a flag for each word,
/// LL128: for each 128 bytes, Simple: in large pieces after a handshake.
struct Protocol {
  const char* ring;
  const char* tree;
  double start_s;      ///< below 0: the link's own
  double latency;      ///< of the link's latency, within a node
  double net_latency;  ///< of the network's latency
  double bandwidth;    ///< of the link's speed
  double tree_s;       ///< latency of a step of a tree, within a node
  double net_tree_s;   ///< and between nodes
  bool needs_nvlink;
};
// LL128's 0.7: NCCL says 120/128, less for all-reduce per channel; 0.7 agrees
// with the A100 below 16 MB (VIA-Research/vTrain).
constexpr Protocol kProtocols[] = {
    {"ring, LL", "tree, LL", 3.6e-6, 0.47 / 3.4, 2.7 / 9.6, 0.25, 0.52e-6, 5e-6,
     false},
    {"ring, LL128", "tree, LL128", 10e-6, 1.9 / 3.4, 4.0 / 9.6, 0.7, 1.2e-6,
     8.5e-6, true},
    {"ring, Simple", "tree, Simple", -1, 1, 1, 1, 28e-6, 50e-6, false}};
/// A tree reaches this share of a ring's bandwidth.
constexpr double kTreeBandwidth = 0.9;
/// Messages of one rank that are under way at a time.
constexpr double kMessagesAtOnce = 8;
/// Smaller collectives than this are not in the tables that links are fitted
/// to.
constexpr double kMeasuredBytes = 1 << 20;

/// What a group's algorithms see of the cluster.
struct Group {
  double size = 0;
  double nodes = 0;
  double members = 0;        ///< on the node with the most
  double fewest = 0;         ///< on the node with the least
  std::vector<int> devices;  ///< of the node with the most
  double node_speed = 0;     ///< of a ring's piece within a node
  double net_speed = 0;      ///< of the group's share of a node's NICs
  bool nvlink = false;

  /// Of a ring through all members.
  double ring_speed() const {
    if (nodes == 1) return node_speed;
    return members == 1 ? net_speed : std::min(node_speed, net_speed);
  }
};

Group make_group(const Cluster& cluster, const std::vector<int>& ranks) {
  std::vector<int> sorted = ranks;
  std::sort(sorted.begin(), sorted.end());
  SB_CHECK(sorted.empty() ||
               (sorted.front() >= 0 && sorted.back() < cluster.num_devices()),
           "cluster ", cluster.name, ": rank ",
           sorted.empty()       ? 0
           : sorted.front() < 0 ? sorted.front()
                                : sorted.back(),
           " is not one of its ", cluster.num_devices(),
           " devices; take more nodes or fewer ranks");
  Group group;
  group.size = static_cast<double>(sorted.size());
  for (std::size_t begin = 0; begin < sorted.size();) {
    const int node = cluster.node_of(sorted[begin]);
    std::size_t end = begin;
    while (end < sorted.size() && cluster.node_of(sorted[end]) == node) ++end;
    const auto members = static_cast<double>(end - begin);
    if (members > group.members) {
      group.members = members;
      group.devices.assign(sorted.begin() + static_cast<std::ptrdiff_t>(begin),
                           sorted.begin() + static_cast<std::ptrdiff_t>(end));
    }
    group.fewest = group.nodes == 0 ? members : std::min(group.fewest, members);
    ++group.nodes;
    begin = end;
  }
  for (int& device : group.devices) device %= cluster.devices_per_node;
  group.net_speed = cluster.network.speed() * cluster.nics_per_node *
                    group.fewest / cluster.devices_per_node;
  return group;
}

/// Steps of a ring and what each costs on this group's links.
class Timer {
 public:
  Timer(const Cluster& cluster, const Group& group)
      : cluster_(cluster), group_(group) {}

  /// `steps` steps around the ring that pass nodes `net_steps` times, and
  /// `pieces` times bytes / size through each link.
  Cost ring(double steps, double net_steps, double bytes, double pieces) const {
    Cost best;
    for (const Protocol& protocol : kProtocols) {
      if (protocol.needs_nvlink && !group_.nvlink) continue;
      const double latency =
          (steps - net_steps) * cluster_.intra_node.latency_s *
              protocol.latency +
          net_steps * cluster_.network.latency_s * protocol.net_latency;
      const double transfer = pieces * bytes / group_.size /
                              (group_.ring_speed() * protocol.bandwidth);
      keep(best, start(protocol) + latency + transfer, protocol.ring);
    }
    return best;
  }

  /// Up and down a tree of nodes, with a chain within each node.
  Cost tree(double bytes) const {
    Cost best;
    for (const Protocol& protocol : kProtocols) {
      if (protocol.needs_nvlink && !group_.nvlink) continue;
      const double latency =
          2 * ((group_.members - 1) * protocol.tree_s +
               std::ceil(std::log2(group_.nodes)) * protocol.net_tree_s);
      const double transfer =
          2 * bytes /
          (group_.ring_speed() * protocol.bandwidth * kTreeBandwidth);
      keep(best, start(protocol) + latency + transfer, protocol.tree);
    }
    return best;
  }

  /// Each member lets the switch sum its part of all buffers, and has the
  /// switch write the sum to all: a buffer and a part through each link each
  /// way. Between nodes the sums go up and down a tree, or once to a switch
  /// that sums as well.
  Cost in_switch(double bytes) const {
    const LinkSpec& inside = cluster_.intra_node;
    const LinkSpec& net = cluster_.network;
    double seconds = bytes * (group_.members + 1) / group_.members /
                     inside.reduction_bytes_per_s;
    double latency = inside.start_s + 2 * inside.latency_s;
    if (group_.nodes > 1) {
      const double sums =
          net.reduction_bytes_per_s > 0
              ? bytes / (net.reduction_bytes_per_s * cluster_.nics_per_node *
                         group_.fewest / cluster_.devices_per_node)
              : 2 * bytes / group_.net_speed;
      seconds = std::max(seconds, sums);
      latency += 2 * std::ceil(std::log2(group_.nodes)) * net.latency_s;
    }
    Cost cost;
    keep(cost, latency + seconds, "in the switch");
    return cost;
  }

  /// One message in `hops` hops on links of `speed`.
  Cost direct(double bytes, double speed, bool between_nodes,
              double hops) const {
    const LinkSpec& link =
        between_nodes ? cluster_.network : cluster_.intra_node;
    Cost best;
    for (const Protocol& protocol : kProtocols) {
      if (protocol.needs_nvlink && (between_nodes || !group_.nvlink)) continue;
      const double share =
          between_nodes ? protocol.net_latency : protocol.latency;
      keep(best,
           start(protocol) + hops * link.latency_s * share +
               bytes / (speed * protocol.bandwidth),
           "direct");
    }
    return best;
  }

 private:
  static void keep(Cost& best, double seconds, const char* how) {
    if (best.seconds == 0 || seconds < best.seconds) {
      best.seconds = seconds;
      best.how = how;
    }
  }

  double start(const Protocol& protocol) const {
    const double own = group_.nodes > 1 ? cluster_.network.start_s
                                        : cluster_.intra_node.start_s;
    return protocol.start_s < 0 ? own : std::min(protocol.start_s, own);
  }

  const Cluster& cluster_;
  const Group& group_;
};

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

/// Time in which a member sends `bytes` to each other member: what leaves its
/// node takes its share of the NICs while the rest stays inside.
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

Cost all_reduce(const Timer& timer, const Cluster& cluster, const Group& group,
                double bytes) {
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

}  // namespace

int CostModel::rings_among(const std::vector<int>& devices) const {
  return rings_->get(devices,
                     [&] { return num_rings(cluster_.mesh, devices); });
}

Cost CostModel::collective(CommOp op, double bytes,
                           const std::vector<int>& ranks) const {
  Group group = make_group(cluster_, ranks);
  if (group.size <= 1) return {};
  if (op == CommOp::kSend || op == CommOp::kRecv) {
    return message(bytes, ranks[0], ranks[1]);
  }
  group.nvlink = cluster_.intra_node.name == "nvlink";
  group.node_speed = cluster_.intra_node.speed();
  if (!cluster_.mesh.empty() && group.members > 1) {
    const int rings = rings_among(group.devices);
    group.nvlink = rings > 0;
    group.node_speed = rings > 0 ? rings * cluster_.intra_node.speed()
                                 : cluster_.host_link.speed();
  }

  const Timer timer(cluster_, group);
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
      if (cluster_.member_s > 0) {
        // Slice by slice into (or out of) one tensor: read once, written once.
        cost.seconds += group.size * cluster_.member_s +
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
      cost.seconds += exchange_seconds(cluster_, group, piece);
      break;
    }
    default:
      SB_FAIL("cost of ", comm_op_name(op), ": no such collective");
  }

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
  group.nvlink = cluster_.intra_node.name == "nvlink";
  const bool between_nodes = group.nodes > 1;
  double speed = cluster_.network.speed() *
                 std::max(1.0, static_cast<double>(cluster_.nics_per_node) /
                                   cluster_.devices_per_node);
  if (between_nodes) {
    speed = std::min(speed, group.net_speed);
  } else {
    speed = pair_speed(cluster_, from % cluster_.devices_per_node,
                       to % cluster_.devices_per_node);
  }
  Cost cost = Timer(cluster_, group).direct(bytes, speed, between_nodes, 1);
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
