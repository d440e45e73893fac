// NCCL's constants come from its own model, src/graph/tuning.cc at
// 01afd20 (hwLat, baseLat), which picks algorithm and protocol at run time.

#include "sim/internal/message_timer.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"

namespace shardbook::sim::internal {

/// How the bytes of a step are handed over. LL: with a flag for each word,
/// LL128: for each 128 bytes, Simple: in large pieces after a handshake.
struct Protocol {
  const char* ring;
  const char* tree;
  double start_s;      ///< as NCCL expects
  double latency;      ///< factor on the link's latency, within a node
  double net_latency;  ///< factor on the network's latency
  double expected;     ///< share of the link's speed, as NCCL expects
  double bandwidth;    ///< share of the link's speed, as measured
  double tree_s;       ///< latency of a step of a tree, within a node
  double net_tree_s;   ///< and between nodes
  bool needs_nvlink;
};
// LL128's 0.7 agrees with the A100 below 16 MB (VIA-Research/vTrain). Links
// without a share of their own use it.
namespace {

constexpr Protocol kLL{.ring = "ring, LL",
                       .tree = "tree, LL",
                       .start_s = 3.6e-6,
                       .latency = 0.47 / 3.4,
                       .net_latency = 2.7 / 9.6,
                       .expected = 0.25,
                       .bandwidth = 0.25,
                       .tree_s = 0.52e-6,
                       .net_tree_s = 5e-6,
                       .needs_nvlink = false};
constexpr Protocol kLL128{.ring = "ring, LL128",
                          .tree = "tree, LL128",
                          .start_s = 10e-6,
                          .latency = 1.9 / 3.4,
                          .net_latency = 4.0 / 9.6,
                          .expected = 0.92,
                          .bandwidth = 0.7,
                          .tree_s = 1.2e-6,
                          .net_tree_s = 8.5e-6,
                          .needs_nvlink = true};
constexpr Protocol kSimple{.ring = "ring, Simple",
                           .tree = "tree, Simple",
                           .start_s = 8.4e-6,
                           .latency = 1,
                           .net_latency = 1,
                           .expected = 1,
                           .bandwidth = 1,
                           .tree_s = 28e-6,
                           .net_tree_s = 50e-6,
                           .needs_nvlink = false};
constexpr const Protocol* kProtocols[] = {&kLL, &kLL128, &kSimple};
/// One step of a ring over NVLink, protocol Simple, as NCCL expects.
constexpr double kExpectedStepS = 3.4e-6;
/// A tree reaches this share of a ring's bandwidth.
constexpr double kTreeBandwidth = 0.9;

Cost cost_of(double latency_s, double transfer_s, double share,
             const char* setup) {
  return {.seconds = latency_s + transfer_s,
          .setup = setup,
          .transfer_s = transfer_s,
          .rate = share,
          .max_rate = share};
}

void keep_faster(Cost& best, const Cost& other) {
  if (best.seconds == 0 || other.seconds < best.seconds) best = other;
}

}  // namespace

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
  const int num_nics =
      std::min(cluster.nics_per_node, cluster.devices_per_node);
  int fewest_nics = num_nics;
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
    int nics = 0, last_nic = -1;
    for (std::size_t i = begin; i < end; ++i) {
      const int device = sorted[i] % cluster.devices_per_node;
      const int nic = device * num_nics / cluster.devices_per_node;
      if (nic != last_nic) ++nics;
      last_nic = nic;
    }
    fewest_nics = std::min(fewest_nics, nics);
    ++group.nodes;
    begin = end;
  }
  for (int& device : group.devices) device %= cluster.devices_per_node;
  group.net_speed = cluster.network.speed() * cluster.nics_per_node *
                    group.fewest / cluster.devices_per_node;
  group.lone_net_speed = cluster.nics_per_node >= cluster.devices_per_node
                             ? group.net_speed
                             : cluster.network.speed() * fewest_nics;
  return group;
}

Cost MessageTimer::ring(double steps, double net_steps, double bytes,
                        double pieces) const {
  const LinkSpec& link = cluster_.intra_node;
  const double piece_s = bytes / group_.size / group_.ring_speed();
  const bool is_fitted =
      group_.nvlink && group_.nodes == 1 && link.ll128_start_s > 0;
  Cost best;
  double least = 0;
  for (const Protocol* protocol : kProtocols) {
    if (protocol->needs_nvlink && !group_.nvlink) continue;
    // Fitted tables begin at 1 MiB, and none of their rows is as fast as LL
    // would be
    if (is_fitted && protocol == &kLL && bytes >= kMeasuredBytes) continue;
    const bool is_ll128 = is_fitted && protocol == &kLL128;
    const double start_s = is_ll128 ? link.ll128_start_s : start(*protocol);
    const double share = is_ll128 ? link.ll128_share : protocol->bandwidth;
    const double latency_s =
        (steps - net_steps) * protocol->latency *
            (is_ll128 ? kExpectedStepS : link.latency_s) +
        net_steps * cluster_.network.latency_s * protocol->net_latency;
    const double transfer_s = pieces * piece_s / share;
    const double seconds = start_s + latency_s + transfer_s;
    // NCCL uses the protocol that it expects to be fastest, even if it is not.
    const double expected_s =
        protocol->start_s + steps * kExpectedStepS * protocol->latency +
        steps * piece_s * link.speed() / link.expected() / protocol->expected;
    const double judged = is_fitted ? expected_s : seconds;
    if (least == 0 || judged < least) {
      least = judged;
      best = cost_of(start_s + latency_s, transfer_s, share, protocol->ring);
    }
  }
  return best;
}

Cost MessageTimer::tree(double bytes) const {
  Cost best;
  for (const Protocol* protocol : kProtocols) {
    if (protocol->needs_nvlink && !group_.nvlink) continue;
    const double latency =
        2 * ((group_.members - 1) * protocol->tree_s +
             std::ceil(std::log2(group_.nodes)) * protocol->net_tree_s);
    const double transfer =
        2 * bytes /
        (group_.ring_speed() * protocol->bandwidth * kTreeBandwidth);
    keep_faster(best,
                cost_of(start(*protocol) + latency, transfer,
                        protocol->bandwidth * kTreeBandwidth, protocol->tree));
  }
  return best;
}

Cost MessageTimer::in_switch(double bytes) const {
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
  const double share =
      group_.nodes > 1
          ? 1.0
          : std::min(1.0, inside.reduction_bytes_per_s / group_.node_speed);
  return cost_of(latency, seconds, share, "in the switch");
}

Cost MessageTimer::direct(double bytes, double speed, bool between_nodes,
                          double hops) const {
  const LinkSpec& link = between_nodes ? cluster_.network : cluster_.intra_node;
  Cost best;
  for (const Protocol* protocol : kProtocols) {
    if (protocol->needs_nvlink && (between_nodes || !group_.nvlink)) continue;
    const double share =
        between_nodes ? protocol->net_latency : protocol->latency;
    keep_faster(best, cost_of(start(*protocol) + hops * link.latency_s * share,
                              bytes / (speed * protocol->bandwidth),
                              protocol->bandwidth, "direct"));
  }
  return best;
}

double MessageTimer::start(const Protocol& protocol) const {
  const double own =
      group_.nodes > 1 ? cluster_.network.start_s : cluster_.intra_node.start_s;
  return &protocol == &kSimple ? own : std::min(protocol.start_s, own);
}

}  // namespace shardbook::sim::internal
