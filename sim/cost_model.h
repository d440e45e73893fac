#pragma once

// Seconds for operations and messages on a cluster.
//
// Operations: a roofline. A product takes flops / (peak * efficiency), where
// efficiency falls for sizes that do not fill the device's units; everything
// else takes bytes / bandwidth. Messages: latency plus bytes over bandwidth,
// for the algorithm that NCCL would choose (ring or tree, by size), over the
// links that the group uses. Groups that cross nodes share the network with
// the other devices of their nodes: all of them are taken to communicate at
// the same time, and share evenly.

#include <vector>

#include "comm/ledger.h"
#include "core/context.h"
#include "sim/cluster.h"
#include "sim/timeline.h"

namespace shardbook::sim {

struct Cost {
  double seconds = 0;
  Trust trust = Trust::kInterpolated;
};

class CostModel {
 public:
  explicit CostModel(Cluster cluster);
  const Cluster& cluster() const { return cluster_; }

  /// Time of one operation on the device of `rank`, without faults and jitter;
  /// on the host where `on_host`.
  Cost operation(const OpEvent& event, bool on_host = false) const;

  /// Time of one collective from the moment that all members have joined.
  /// `numel` and op as in CommRecord; `ranks`: the world ranks of the group.
  Cost collective(CommOp op, double bytes, const std::vector<int>& ranks) const;
  /// Time of one message between two ranks.
  Cost message(double bytes, int from, int to) const;
  /// Time of one copy between a device and its host.
  Cost host_copy(double bytes) const;

  /// The kind of link that carries (most of) a group's traffic.
  const LinkSpec& link(const std::vector<int>& ranks) const;
  /// How many times slower than the others this rank computes / the messages
  /// of this group are.
  double compute_slowdown(int rank) const;
  double link_slowdown(const std::vector<int>& ranks) const;

 private:
  Cluster cluster_;
};

}  // namespace shardbook::sim
