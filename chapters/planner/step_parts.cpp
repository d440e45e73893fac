#include "chapters/planner/step_parts.h"

#include <algorithm>
#include <cmath>

#include "core/context.h"

namespace shardbook::planner {

double activation_bytes(const HybridJob& job) {
  return static_cast<double>(job.layout.micro_batch * job.sizes.seq *
                             job.sizes.hidden) /
         job.layout.cp * static_cast<double>(dtype_bytes(job.layout.dtype));
}

/// The part that one rank of tp sends to the next stage.
double sent_activation(const HybridJob& job) {
  const bool is_part = job.scatters_messages || job.layout.cuts_tokens;
  return activation_bytes(job) / (is_part ? job.layout.tp : 1);
}

double table_elements(const HybridJob& job) {
  return static_cast<double>(job.sizes.vocabulary * job.sizes.hidden) /
         job.layout.tp;
}

double block_elements(const HybridJob& job, const StageRun& whole) {
  const double ends = 2 * table_elements(job);
  return (whole.parameters - ends) / static_cast<double>(job.layers);
}

double in_buckets(const sim::CostModel& costs, CommOp op, double bytes,
                  double bucket_bytes, const std::vector<int>& ranks) {
  if (bucket_bytes <= 0 || bytes <= bucket_bytes) {
    return costs.collective(op, bytes, ranks).seconds;
  }
  const double buckets = std::round(bytes / bucket_bytes);
  return buckets * costs.collective(op, bytes / buckets, ranks).seconds;
}

double zero_seconds(const HybridJob& job, const sim::CostModel& costs,
                    const StageRun& run) {
  const std::vector<int> replicas = Ranks(job).of_replicas();
  const auto element = static_cast<double>(dtype_bytes(job.layout.dtype));
  const auto gradient = static_cast<double>(dtype_bytes(job.gradient_dtype));
  const double block = block_elements(job, run), table = table_elements(job);
  const auto blocks = static_cast<double>(job.layers);
  const auto scatter = [&](double elements) {
    return in_buckets(costs, CommOp::kReduceScatter, elements * gradient,
                      job.bucket_bytes, replicas);
  };
  // Shards of gradients go to the host as they come, those of parameters come
  // from there
  const auto copy = [&](double elements) {
    if (!job.offloads) return 0.0;
    return costs.host_copy(elements / job.replicas() * element).seconds;
  };
  const double forward = run.forward_s, backward = run.backward_s;
  const double reduce = std::max(scatter(block), copy(block));
  double each = 0;
  if (job.zero_stage == 2) {
    // The last bucket has nothing to run beside
    each = forward +
           std::max(backward + reduce, blocks * reduce + backward / blocks) +
           scatter(table);
  } else {
    const auto gather = [&](double elements) {
      return copy(elements) +
             costs.collective(CommOp::kAllGather, elements * element, replicas)
                 .seconds;
    };
    const double fetch = gather(block);
    each = gather(table) +
           std::max(fetch + forward, blocks * fetch + forward / blocks) +
           std::max(fetch + backward + reduce,
                    blocks * (fetch + reduce) + backward / blocks) +
           scatter(table);
  }
  return static_cast<double>(job.micro_batches) * each;
}

double update_on_host_seconds(const HybridJob& job, const sim::CostModel& costs,
                              double elements) {
  const auto element = static_cast<double>(dtype_bytes(job.layout.dtype));
  const double down = costs.host_copy(elements * element).seconds;
  // Gradient, master copy, two moments are read, the last three are written;
  // then the copy in 16 bits
  const double bytes = elements * (element + 4 + 8 + 4 + 8 + element);
  OpEvent adam{};
  adam.name = "adamw";
  adam.flops = 12 * elements;
  adam.bytes = bytes;
  adam.phase = Phase::kOptimizer;
  return down + costs.operation(adam, /*on_host=*/true).seconds + down;
}

std::map<std::string, double> sent_bytes(const HybridJob& job,
                                         const sim::CostModel& costs,
                                         const std::vector<StageRun>& runs) {
  const Ranks ranks(job);
  const auto element = static_cast<double>(dtype_bytes(job.layout.dtype));
  const auto gradient = static_cast<double>(dtype_bytes(job.gradient_dtype));
  const auto m = static_cast<double>(job.micro_batches);
  const double d = job.replicas();
  const double half = (d - 1) / d;
  std::map<std::string, double> most;
  double largest = -1;
  for (int rank = 0; rank < job.pp; ++rank) {
    std::map<std::string, double> bytes;
    // Inside the layers
    for (int chunk = 0; chunk < job.chunks; ++chunk) {
      const StageRun& run =
          runs[static_cast<std::size_t>(chunk * job.pp + rank)];
      for (const auto& [link, each] : run.sent_bytes) bytes[link] += m * each;
    }
    // Every chunk sends to its two neighbours; the model's first and last have one
    if (job.pp > 1) {
      const auto send = [&](int to, int chunks) {
        const int peer = ranks.at_stage((to + job.pp) % job.pp);
        bytes[costs.link({ranks.at_stage(rank), peer}).name] +=
            chunks * m * sent_activation(job);
      };
      send(rank + 1, job.chunks - (rank == job.pp - 1 ? 1 : 0));
      send(rank - 1, job.chunks - (rank == 0 ? 1 : 0));
    }
    // Gradients and parameters, over dp and cp
    const double parameters = parameters_of(job, runs, rank);
    const double scatters = job.zero_stage >= 2 ? m : 1;
    const double gathers = job.zero_stage == 3 ? 2 * m : 1;
    if (d > 1) {
      bytes[costs.link(ranks.of_replicas()).name] +=
          job.distributes()
              ? half * parameters * (scatters * gradient + gathers * element)
              : 2 * half * parameters * gradient;
    }
    if (job.offloads) {
      // Gradients go to the host, parameters come back; with ZeRO-3 before
      // every gather
      const double copies = job.zero_stage == 3 ? 2 * m : 1;
      bytes[job.cluster.host_link.name] +=
          parameters / d * (m * gradient + copies * element);
    }
    const bool is_end = rank == 0 || rank == job.pp - 1;
    if (job.is_tied && job.pp > 1 && is_end) {
      bytes[costs.link({0, ranks.at_stage(job.pp - 1)}).name] +=
          table_elements(job) * gradient;
    }
    double total = 0;
    for (const auto& [link, each] : bytes) total += each;
    if (total > largest) most = bytes;
    largest = std::max(largest, total);
  }
  return most;
}

}  // namespace shardbook::planner
