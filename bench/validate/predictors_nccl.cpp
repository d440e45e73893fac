// Collectives, by the cost model.

#include <fmt/format.h>

#include <map>
#include <numeric>

#include "bench/validate/kinds.h"
#include "core/check.h"
#include "sim/cost_model.h"

namespace shardbook::validate {
namespace {

// Below this, launch and latency dominate, and figures vary from run to run.
constexpr double kLargeBytes = 16e6;

sim::Cluster machine_of(const Row& row) {
  for (const auto& [prefix, cluster] :
       {std::pair("A100", "dgx-a100"), std::pair("V100", "dgx-v100"),
        std::pair("H100", "dgx-h100")}) {
    if (row.begins("gpu", prefix)) return sim::Cluster::read(cluster);
  }
  throw NotExpressed("no cluster has " + row.text("gpu"));
}

CommOp operation_of(const Row& row) {
  static const std::map<std::string, CommOp> names = {
      {"all_reduce", CommOp::kAllReduce},
      {"all_gather", CommOp::kAllGather},
      {"reduce_scatter", CommOp::kReduceScatter},
      {"broadcast", CommOp::kBroadcast},
      {"all_to_all", CommOp::kAllToAll}};
  const std::string& name = row.text("collective");
  require(names.count(name) > 0,
          "collective " + name + " is not in the cost model");
  return names.at(name);
}

sim::Cost cost_of(const Row& row, const sim::Cluster& cluster, CommOp op,
                  double bytes, int ranks) {
  const int devices = cluster.num_devices();
  SB_CHECK(ranks >= 2 && ranks <= devices, row.place(), ": ranks is ", ranks,
           "; give 2 to ", devices, ", the devices of ", cluster.name);
  std::vector<int> first(static_cast<std::size_t>(ranks));
  std::iota(first.begin(), first.end(), 0);
  return sim::CostModel(cluster).collective(op, bytes, first);
}

/// The cluster that a row describes, or the one that its words name:
/// "NVLink3 A100 8-GPU", "DGX H100 SHARP 8x400Gb RDMA, multi-node".
sim::Cluster fabric_cluster(const Row& row) {
  if (row.has("cluster")) {
    const std::string& cluster = row.text("cluster");
    return cluster.front() == '{'
               ? sim::Cluster::from_json(cluster, row.place())
               : sim::Cluster::read(cluster);
  }
  const auto says = [&](const char* word) { return row.says("fabric", word); };
  if (says("A100")) return sim::Cluster::read("dgx-a100");
  if (says("V100")) return sim::Cluster::read("dgx-v100");
  require(says("H100"), "fabric \"" + row.text("fabric") +
                            "\" comes without a description of its cluster");
  sim::Cluster cluster = sim::Cluster::read("dgx-h100");
  // The preset sums in the node's switch, and not in the network
  const bool has_many_nodes = says("multi-node");
  if (says("SHARP") == has_many_nodes) {
    (has_many_nodes ? cluster.network : cluster.intra_node)
        .reduction_bytes_per_s = has_many_nodes ? 48e9 : 0;
  }
  return cluster;
}

}  // namespace

std::vector<Outcome> collective_time(const Row& row) {
  const int ranks = row.count("ranks");
  const double bytes = row.positive("size_bytes");
  const sim::Cost cost =
      cost_of(row, machine_of(row), operation_of(row), bytes, ranks);
  // The null model: one bandwidth for the bytes that a rank sends
  return {{fmt::format("{} of {:.4g} MB over {} {}", row.text("collective"),
                       bytes / 1e6, ranks, row.text("gpu")),
           "us",
           {cost.seconds * 1e6, row.positive("time_us"),
            bytes * (ranks - 1) / ranks},
           sim::trust_name(cost.trust),
           /*last_digit=*/0,
           /*is_aimed_at=*/bytes > kLargeBytes}};
}

// The bytes that an all-reduce of 8 GB sends per rank and second.
std::vector<Outcome> bus_bandwidth(const Row& row) {
  const int ranks = row.has("ranks")                   ? row.count("ranks")
                    : row.says("fabric", "multi-node") ? 16
                                                       : 8;
  constexpr double kBytes = 8e9;
  const sim::Cost cost =
      cost_of(row, fabric_cluster(row), CommOp::kAllReduce, kBytes, ranks);
  return {{row.text("fabric"),
           "GB/s",
           {2.0 * (ranks - 1) / ranks * kBytes / cost.seconds / 1e9,
            row.positive("allreduce_busbw_GBps")},
           sim::trust_name(cost.trust)}};
}

}  // namespace shardbook::validate
