#include "sim/cost_model.h"

#include <algorithm>

namespace shardbook::sim {

CostModel::CostModel(Cluster cluster) : cluster_(std::move(cluster)) {}

Cost CostModel::operation(const OpEvent& event, bool on_host) const {
  const DeviceSpec& on = on_host ? cluster_.host : cluster_.device;
  const auto peak = on.peak_flops.find(event.dtype);
  double seconds = event.bytes / (on.memory_bytes_per_s * on.memory_efficiency);
  if (event.product.m > 0 && peak != on.peak_flops.end()) {
    seconds = std::max(seconds, event.flops / (peak->second *
                                               on.max_matmul_efficiency));
  }
  return {std::max(seconds, on.kernel_s), on.trust};
}

Cost CostModel::collective(CommOp op, double bytes,
                           const std::vector<int>& ranks) const {
  const double n = static_cast<double>(ranks.size());
  if (n <= 1) return {};
  const LinkSpec& on = link(ranks);
  const double rounds = op == CommOp::kAllReduce ? 2 * (n - 1) : n - 1;
  if (op == CommOp::kBarrier) return {rounds * on.latency_s};
  return {rounds * (on.latency_s + bytes / n / on.bytes_per_s)};
}

Cost CostModel::message(double bytes, int from, int to) const {
  const LinkSpec& on = link({from, to});
  return {on.latency_s + bytes / on.bytes_per_s};
}

Cost CostModel::host_copy(double bytes) const {
  return {cluster_.host_link.latency_s + bytes / cluster_.host_link.bytes_per_s};
}

const LinkSpec& CostModel::link(const std::vector<int>& ranks) const {
  for (const int rank : ranks) {
    if (cluster_.node_of(rank) != cluster_.node_of(ranks[0])) {
      return cluster_.network;
    }
  }
  return cluster_.intra_node;
}

double CostModel::compute_slowdown(int rank) const {
  double factor = 1;
  for (const Fault& fault : cluster_.faults) {
    if (fault.rank == rank) factor *= fault.compute_slowdown;
  }
  return factor;
}

double CostModel::link_slowdown(const std::vector<int>& ranks) const {
  double factor = 1;
  for (const Fault& fault : cluster_.faults) {
    if (std::count(ranks.begin(), ranks.end(), fault.rank) > 0) {
      factor = std::max(factor, fault.link_slowdown);
    }
  }
  return factor;
}

}  // namespace shardbook::sim
