#pragma once

// The algorithms of collectives, timed on the links of one group.

#include <vector>

#include "sim/cost_model.h"

namespace shardbook::sim::internal {

struct Protocol;

/// Smaller collectives than this are not in the tables that links are fitted
/// to.
constexpr double kMeasuredBytes = 1 << 20;

/// The cluster as the algorithms of one group see it.
struct Group {
  double size = 0;
  double nodes = 0;
  double members = 0;         ///< on the fullest node
  double fewest = 0;          ///< on the emptiest node
  std::vector<int> devices;   ///< of the fullest node
  double node_speed = 0;      ///< a ring's part within a node
  double net_speed = 0;       ///< the group's share of a node's NICs
  double lone_net_speed = 0;  ///< these NICs, if no other group uses them
  bool nvlink = false;

  /// Speed of a ring through all members.
  double ring_speed() const { return ring_speed(net_speed); }
  double ring_speed(double net) const {
    if (nodes == 1) return node_speed;
    return members == 1 ? net : std::min(node_speed, net);
  }
};

/// Nodes, members and network of a group; its links within a node are up to
/// the caller. Throws Error when a rank is not on the cluster.
Group make_group(const Cluster& cluster, const std::vector<int>& ranks);

/// Times one algorithm with the protocol that is fastest. A cost's `rate` and
/// `max_rate` are shares of the speed of ring or link here.
class MessageTimer {
 public:
  MessageTimer(const Cluster& cluster, const Group& group)
      : cluster_(cluster), group_(group) {}

  /// `steps` steps around the ring that pass nodes `net_steps` times, and
  /// `pieces` times bytes / size through each link.
  Cost ring(double steps, double net_steps, double bytes, double pieces) const;

  /// All-reduce up and down a tree of nodes, with a chain within each node.
  Cost tree(double bytes) const;

  /// All-reduce in which each member lets the switch sum its part of all
  /// buffers, and has the switch write the sum to all: a buffer and a part
  /// through each link each way. Between nodes the sums go up and down a tree,
  /// or once to a switch that sums as well.
  Cost in_switch(double bytes) const;

  /// One message in `hops` hops on links of `speed`.
  Cost direct(double bytes, double speed, bool between_nodes,
              double hops) const;

 private:
  double start(const Protocol& protocol) const;

  const Cluster& cluster_;
  const Group& group_;
};

}  // namespace shardbook::sim::internal
