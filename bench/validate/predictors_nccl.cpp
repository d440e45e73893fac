// Collectives, by the cost model.

#include <fmt/format.h>

#include <map>
#include <memory>
#include <numeric>

#include "bench/validate/kinds.h"
#include "core/check.h"
#include "sim/cost_model.h"

namespace shardbook::validate {
namespace {

// Below this, launch and latency dominate, and figures vary from run to run.
constexpr double kLargeBytes = 16e6;

std::vector<int> first_ranks(int count) {
  std::vector<int> ranks(static_cast<std::size_t>(count));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

/// Cost models by cluster (a preset's name or JSON), each made once.
const sim::CostModel& costs_of(const std::string& cluster,
                               const std::string& label) {
  static std::map<std::string, std::unique_ptr<sim::CostModel>> models;
  auto& model = models[cluster];
  if (model == nullptr) {
    model = std::make_unique<sim::CostModel>(
        cluster.front() == '{' ? sim::Cluster::from_json(cluster, label)
                               : sim::Cluster::read(cluster));
  }
  return *model;
}

const sim::CostModel& machine_of(const Row& row) {
  const std::string& gpu = row.text("gpu");
  for (const auto& [prefix, cluster] :
       {std::pair("A100", "dgx-a100"), std::pair("V100", "dgx-v100"),
        std::pair("H100", "dgx-h100")}) {
    if (gpu.rfind(prefix, 0) == 0) return costs_of(cluster, row.place());
  }
  throw NotExpressed("no cluster has " + gpu);
}

CommOp operation_of(const Row& row) {
  static const std::map<std::string, CommOp> names = {
      {"all_reduce", CommOp::kAllReduce},
      {"all_gather", CommOp::kAllGather},
      {"reduce_scatter", CommOp::kReduceScatter},
      {"broadcast", CommOp::kBroadcast},
      {"all_to_all", CommOp::kAllToAll}};
  const auto found = names.find(row.text("collective"));
  if (found == names.end()) {
    throw NotExpressed("collective " + row.text("collective") +
                       " is not in the cost model");
  }
  return found->second;
}

void check_size(const Row& row, const sim::CostModel& costs, int ranks) {
  const int devices = costs.cluster().num_devices();
  SB_CHECK(ranks >= 2 && ranks <= devices, row.place(), ": ranks is ", ranks,
           "; give 2 to ", devices, ", the devices of ", costs.cluster().name);
}

/// The cluster that a row describes, or the one that its words name:
/// "NVLink3 A100 8-GPU", "DGX H100 SHARP 8x400Gb RDMA, multi-node".
std::string fabric_cluster(const Row& row) {
  if (row.has("cluster")) return row.text("cluster");
  const std::string& fabric = row.text("fabric");
  const auto says = [&](const char* word) {
    return fabric.find(word) != std::string::npos;
  };
  if (says("A100")) return "dgx-a100";
  if (says("V100")) return "dgx-v100";
  if (!says("H100")) {
    throw NotExpressed("fabric \"" + fabric +
                       "\" comes without a description of its cluster");
  }
  const bool has_many_nodes = says("multi-node");
  if (says("SHARP") != has_many_nodes) return "dgx-h100";
  // The preset sums in the node's switch, and not in the network
  return has_many_nodes ? R"({"extends": "dgx-h100",
                   "network": {"reduction_GB_per_s": 48}})"
                        : R"({"extends": "dgx-h100",
                   "intra_node": {"reduction_GB_per_s": 0}})";
}

}  // namespace

std::vector<Outcome> collective_time(const Row& row) {
  const sim::CostModel& costs = machine_of(row);
  const int ranks = row.count("ranks");
  check_size(row, costs, ranks);
  const double bytes = row.positive("size_bytes");
  const sim::Cost cost =
      costs.collective(operation_of(row), bytes, first_ranks(ranks));
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
  // Named: a reference from a call on temporaries looks dangling to GCC 14
  const std::string cluster = fabric_cluster(row);
  const sim::CostModel& costs = costs_of(cluster, row.place());
  const bool has_many_nodes =
      row.text("fabric").find("multi-node") != std::string::npos;
  const int ranks =
      row.has("ranks") ? row.count("ranks") : (has_many_nodes ? 16 : 8);
  check_size(row, costs, ranks);
  constexpr double kBytes = 8e9;
  const sim::Cost cost =
      costs.collective(CommOp::kAllReduce, kBytes, first_ranks(ranks));
  return {{row.text("fabric"),
           "GB/s",
           {2.0 * (ranks - 1) / ranks * kBytes / cost.seconds / 1e9,
            row.positive("allreduce_busbw_GBps")},
           sim::trust_name(cost.trust)}};
}

}  // namespace shardbook::validate
