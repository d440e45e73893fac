// By formulae alone: model states under ZeRO, and collectives.

#include <fmt/format.h>

#include <numeric>

#include "bench/validate/kinds.h"
#include "chapters/03_zero_fsdp/zero/zero_memory.h"
#include "core/check.h"
#include "sim/cost_model.h"

namespace shardbook::validate {
namespace {

/// A value as printed, to be matched digit by digit.
Outcome printed(const Row& row, const std::string& name, const char* unit,
                const char* column, double predicted, double null_scale) {
  return {name,
          unit,
          {predicted, row.positive(column), null_scale},
          "formula",
          last_digit(row.text(column))};
}

int stage_of(const Row& row) {
  const int stage = row.integer("zero_stage");
  SB_CHECK(stage >= 0 && stage <= 3, row.place(), ": zero_stage is ", stage,
           "; give 0 to 3");
  return stage;
}

/// "V100-32GB": 32e9.
double capacity_bytes(const Row& row) {
  const auto gigabytes = numbers_in(row, "gpu", R"(.*-(\d+\.?\d*)\D*)");
  SB_CHECK(!gigabytes.empty() && gigabytes[0] > 0, row.place(), ": gpu is \"",
           row.text("gpu"), "\"; give one with its memory, such as V100-32GB");
  return gigabytes[0] * 1e9;
}

// Below this, launch and latency dominate, and figures vary from run to run.
constexpr double kLargeBytes = 16e6;

/// The cluster of the GPU that a column names.
sim::Cluster preset_of(const Row& row, const char* column) {
  for (const auto& [gpu, cluster] :
       {std::pair("A100", "dgx-a100"), std::pair("V100", "dgx-v100"),
        std::pair("H100", "dgx-h100")}) {
    if (row.says(column, gpu)) return sim::Cluster::read(cluster);
  }
  throw NotExpressed("no cluster is known for " + row.text(column));
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
  sim::Cluster cluster = preset_of(row, "fabric");
  if (!says("H100")) return cluster;
  // The preset sums in the node's switch, and not in the network
  const bool has_many_nodes = says("multi-node");
  if (says("SHARP") == has_many_nodes) {
    (has_many_nodes ? cluster.network : cluster.intra_node)
        .reduction_bytes_per_s = has_many_nodes ? 48e9 : 0;
  }
  return cluster;
}

}  // namespace

// Decimal GB of one device. Rajbhandari et al. 2020, table 1.
std::vector<Outcome> model_states(const Row& row) {
  const std::string& optimizer = row.text("optimizer");
  require(row.says("optimizer", "(2+2+12 bytes)"),
          "optimizer \"" + optimizer + "\" has no known bytes");
  const double parameters = row.positive("params");
  const int dp = row.count("dp");
  const int stage = stage_of(row);
  return {printed(
      row, fmt::format("{}, stage {}, {} GPUs", row.text("model"), stage, dp),
      "GB per GPU", "per_device_GB_reported",
      zero::model_states(stage, parameters, dp).total() / 1e9, parameters)};
}

// Billions of parameters whose model states fit; model parallelism of degree mp
// holds mp times as many. Rajbhandari et al. 2020, table 2.
std::vector<Outcome> largest_models(const Row& row) {
  const char* columns[] = {"baseline_theory_B", "pos_theory_B",
                           "pos_g_theory_B", "pos_g_p_theory_B"};
  const int mp = row.count("mp"), dp = row.count("dp");
  std::vector<Outcome> outcomes;
  for (int stage = 0; stage <= 3; ++stage) {
    const double largest =
        mp * zero::max_parameters(stage, capacity_bytes(row), dp);
    outcomes.push_back(printed(
        row,
        fmt::format("stage {}, {} x {} {}", stage, mp, dp, row.text("gpu")),
        "billion parameters", columns[stage], largest / 1e9, mp * dp));
  }
  return outcomes;
}

// GiB of one device, and of the host where the table has it.
std::vector<Outcome> deepspeed_estimates(const Row& row) {
  const int stage = stage_of(row);
  require(stage >= 2, "DeepSpeed has estimators of stages 2 and 3 only");
  zero::DeepSpeedSetup setup;
  setup.parameters = row.positive("params");
  setup.largest_layer = row.positive("largest_layer_params");
  setup.devices_per_node = row.count("gpus");
  if (row.has("nodes")) setup.nodes = row.count("nodes");
  if (row.has("offload_optimizer")) {
    setup.offload_optimizer = row.flag("offload_optimizer");
    setup.offload_parameters = row.flag("offload_param");
    setup.zero_init = row.flag("zero_init");
  } else {
    // In words: "offload params+optimizer cpu, zero_init=1"
    setup.offload_optimizer = row.says("offload", "optimizer");
    setup.offload_parameters = row.says("offload", "params");
    setup.zero_init = !row.says("offload", "zero_init=0");
  }
  const auto estimate = zero::deepspeed_estimate(stage, setup);
  constexpr double kGiB = 1 << 30;
  const std::string name =
      fmt::format("{}, stage {}, {} GPUs{}{}", row.text("model"), stage,
                  setup.devices_per_node * setup.nodes,
                  setup.offload_optimizer ? ", optimizer on the host" : "",
                  setup.offload_parameters ? ", parameters too" : "");
  std::vector<Outcome> outcomes = {
      printed(row, name, "GiB per GPU", "per_gpu_GiB",
              estimate.device_bytes / kGiB, setup.parameters)};
  if (row.has("per_cpu_GiB")) {
    outcomes.push_back(printed(row, name, "GiB per host", "per_cpu_GiB",
                               estimate.host_bytes / kGiB, setup.parameters));
  }
  return outcomes;
}

std::vector<Outcome> collective_time(const Row& row) {
  const int ranks = row.count("ranks");
  const double bytes = row.positive("size_bytes");
  const auto op = choice<CommOp>(row, "collective",
                                 {{"all_reduce", CommOp::kAllReduce},
                                  {"all_gather", CommOp::kAllGather},
                                  {"reduce_scatter", CommOp::kReduceScatter},
                                  {"broadcast", CommOp::kBroadcast},
                                  {"all_to_all", CommOp::kAllToAll}});
  const sim::Cost cost = cost_of(row, preset_of(row, "gpu"), op, bytes, ranks);
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
