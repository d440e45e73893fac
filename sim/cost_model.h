#pragma once

// Seconds for operations and messages on a cluster.
//
//   CostModel costs(Cluster::read("dgx-a100"));
//   costs.collective(CommOp::kAllReduce, 1e9, {0, 1, 2, 3}).seconds;
//
// Operations: a roofline. A product takes as many rounds over the device's
// units as it has tiles for; everything else, and a product with little to
// compute, takes bytes over bandwidth. Nothing is shorter than a kernel.
//
// Messages: latency plus bytes over bandwidth, for the algorithm (ring, tree,
// sums in the switch) and the protocol (LL, LL128, Simple: less latency for
// less bandwidth) that is fastest, as NCCL chooses. Prices assume that all
// devices of a node use its NICs at the same time and share them evenly. In the
// `sim` world, only messages that overlap share links (sim/shared_network.h).
//
// A model is read-only once made, and may be used from any thread.

#include <memory>
#include <vector>

#include "comm/ledger.h"
#include "core/context.h"
#include "sim/cluster.h"
#include "sim/timeline.h"

namespace shardbook::sim {

struct Cost {
  double seconds = 0;
  Trust trust = Trust::kInterpolated;
  /// The choice: "ring, LL128"; for operations the bound: "matrix units",
  /// "memory", "kernel".
  const char* setup = "";
  /// Messages: the last part of `seconds`, in which links carry bytes; 0 if
  /// other messages cannot slow it down.
  double transfer_s = 0;
  /// Bytes per second in that part on each member's line: its share of the NICs
  /// between nodes, its port within a node. `rate`: as priced; `max_rate`: with
  /// NICs that no other group uses.
  double rate = 0, max_rate = 0;
};

struct RingCache;

class CostModel {
 public:
  explicit CostModel(Cluster cluster);
  const Cluster& cluster() const { return cluster_; }

  /// Time of one operation on the device of a rank, without faults and jitter.
  /// With `on_host`, on the rank's share of the host: the ranks of a node are
  /// assumed to use it at the same time.
  Cost operation(const OpEvent& event, bool on_host = false) const;

  /// Time of one collective from the moment that all members have joined.
  /// `bytes`: CommRecord's numel times the size of an element; `ranks`: the
  /// world ranks of the group. send and recv: from the first to the second.
  /// Cost: O(P log P). Throws Error when a rank is not on the cluster.
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
  /// Rings over the mesh among these devices of one node, cached.
  int rings_among(const std::vector<int>& devices) const;

  Cluster cluster_;
  std::shared_ptr<RingCache> rings_;
};

}  // namespace shardbook::sim
