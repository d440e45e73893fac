// Bounds that cost nothing, by which most plans are left out.

#include <algorithm>

#include "chapters/planner/plan.h"

namespace shardbook::planner {
namespace {

/// FLOPs per second that no operation of the device exceeds.
double best_rate(const Question& question) {
  const sim::DeviceSpec& device = question.base.cluster.device;
  double rate = 0;
  const auto peak = device.peak_flops.find(question.dtype);
  if (peak != device.peak_flops.end()) {
    rate =
        peak->second * device.sustained *
        std::max(device.max_matmul_efficiency, device.max_attention_efficiency);
  }
  for (const auto& [name, measured] : device.operations) {
    if (measured.s_per_flop > 0) {
      rate = std::max(rate, 1 / measured.s_per_flop);
    }
  }
  return rate;
}

/// Bytes per second that no line of a rank exceeds.
double fastest_link(const sim::Cluster& cluster) {
  const double in_node = std::max(cluster.intra_node.bytes_per_s,
                                  cluster.intra_node.reduction_bytes_per_s);
  const double between = std::max(cluster.network.bytes_per_s,
                                  cluster.network.reduction_bytes_per_s) *
                         cluster.nics_per_node;
  const double mesh = static_cast<double>(cluster.mesh.size() + 1);
  return std::max(in_node * mesh, between);
}

/// Blocks on each rank of the pipeline.
std::vector<double> blocks_of_ranks(const HybridJob& job) {
  std::vector<double> blocks(static_cast<std::size_t>(job.pp));
  for (std::size_t i = 0; i < job.blocks.size(); ++i) {
    blocks[i % blocks.size()] += static_cast<double>(job.blocks[i]);
  }
  return blocks;
}

/// Elements of the rank with most parameters, norms and biases left out.
double most_weights(const HybridJob& job) {
  const std::vector<double> blocks = blocks_of_ranks(job);
  double most = 0;
  for (std::size_t rank = 0; rank < blocks.size(); ++rank) {
    const bool has_table = rank == 0 || rank + 1 == blocks.size();
    most = std::max(most, blocks[rank] * weight_products(job) / job.layout.tp +
                              (has_table ? job.table() : 0));
  }
  return most;
}

}  // namespace

double least_seconds(const Question& question, const Plan& plan) {
  const HybridJob job = job_of(question, plan);
  const double rate = best_rate(question);
  const auto m = static_cast<double>(job.micro_batches);
  const double tokens =
      static_cast<double>(job.layout.micro_batch * job.sizes.seq) /
      job.layout.cp;
  // Masked attention needs half of its products
  const double attention = attention_products(job) / 2;
  const double weights = weight_products(job);
  const double again = plan.recompute == "blocks"      ? weights + attention
                       : plan.recompute == "attention" ? attention
                                                       : 0;
  const double flops = 2 * tokens / job.layout.tp;
  double block = flops * (3 * (weights + attention) + again) / rate;
  const double head = 2 * tokens * 3 * job.table() / rate;
  // Sums over tp in forward wait for the links
  const double t = job.layout.tp;
  const double link = fastest_link(question.base.cluster);
  if (!job.overlaps_tensor)
    block += 2 * (t - 1) / t * tokens * static_cast<double>(job.sizes.hidden) *
             job.element() / link;

  // The last rank waits for the way there of the first micro-batch, and the
  // first rank for the way back of the last one. Zero bubble fills the way
  // back with gradients of weights.
  const std::vector<double> blocks = blocks_of_ranks(job);
  double slowest = 0, before = 0;
  for (std::size_t rank = 0; rank < blocks.size(); ++rank) {
    const bool is_last = rank + 1 == blocks.size();
    const double own = blocks[rank] * block + (is_last ? head : 0);
    slowest = std::max(slowest, m * own + before);
    before += static_cast<double>(job.blocks[rank]) * block *
              (job.is_zero_bubble ? 1.0 / 3 : 1);
  }

  // Sums of gradients that wait for all backwards
  double sums = 0;
  const double d = job.replicas();
  if (d > 1 && job.zero_stage <= 1 && !job.overlaps_gradients) {
    sums = (d - 1) / d * most_weights(job) * job.element() / link;
  }
  return slowest + sums;
}

double least_bytes(const Question& question, const Plan& plan) {
  const HybridJob job = job_of(question, plan);
  const zero::ModelStates states = job.states(most_weights(job));
  if (!plan.offloads) return states.total();
  return job.zero_stage == 3 ? 0 : states.parameters;
}

}  // namespace shardbook::planner
