#include "chapters/planner/step.h"

#include <algorithm>
#include <map>
#include <sstream>
#include <vector>

#include "chapters/06_1f1b/schedules.h"
#include "chapters/common/pipeline/replay.h"
#include "chapters/planner/step_parts.h"
#include "core/check.h"
#include "sim/cost_model.h"

namespace shardbook::planner {
namespace {

/// From one rank of the pipeline to the next. Every rank of tp sends its part;
/// where all need the whole, they gather it afterwards (Narayanan et al. 2021,
/// section 4.1).
double message_seconds(const HybridJob& job, const sim::CostModel& costs,
                       int pp_rank) {
  const Ranks ranks(job);
  double seconds = costs
                       .message(sent_activation(job), ranks.at_stage(pp_rank),
                                ranks.at_stage((pp_rank + 1) % job.pp))
                       .seconds;
  if (!job.layout.cuts_tokens && job.layout.tp > 1 && job.scatters_messages) {
    seconds += costs
                   .collective(CommOp::kAllGather, activation_bytes(job),
                               ranks.of_tp())
                   .seconds;
  }
  return seconds;
}

/// By rank: the mean of its messages to the next one and to the one before.
std::vector<double> messages_of_ranks(const HybridJob& job,
                                      const sim::CostModel& costs) {
  std::vector<double> next;
  for (int rank = 0; rank < job.pp; ++rank) {
    // Only chunks go on from the last to the first
    const bool is_last = rank + 1 == job.pp && job.chunks == 1;
    next.push_back(is_last ? next.back() : message_seconds(job, costs, rank));
  }
  std::vector<double> mean = next;
  for (std::size_t rank = 0; rank < mean.size(); ++rank) {
    const bool is_first = rank == 0 && job.chunks == 1;
    const std::size_t before = (rank + mean.size() - 1) % mean.size();
    mean[rank] = (next[rank] + next[is_first ? rank : before]) / 2;
  }
  return mean;
}

pipeline::Schedule schedule_of(const HybridJob& job, int micro_batches) {
  namespace schedules = pipeline::schedules;
  if (job.is_zero_bubble) return schedules::zb_h1(job.pp, micro_batches);
  return job.chunks == 1
             ? schedules::one_f_one_b(job.pp, micro_batches)
             : schedules::interleaved(job.pp, micro_batches, job.chunks);
}

double pipeline_seconds(const HybridJob& job, const sim::CostModel& costs,
                        const std::vector<StageRun>& runs) {
  const auto m = static_cast<int>(job.micro_batches);
  if (job.pp == 1) {
    const StageRun& run = runs[0];
    if (job.zero_stage >= 2) return zero_seconds(job, costs, run);
    const double each = run.forward_s + run.backward_s;
    return job.is_synchronous ? m * each : each + (m - 1) * run.both_s;
  }
  std::vector<pipeline::Costs> stages;
  const std::vector<double> messages = messages_of_ranks(job, costs);
  for (const StageRun& run : runs) {
    pipeline::Costs each;
    each.forward = run.forward_s;
    each.backward = run.backward_s;
    each.backward_input = run.backward_input_s;
    each.backward_weight = run.backward_weight_s;
    each.communication = messages[stages.size() % messages.size()];
    stages.push_back(each);
  }
  const auto seconds = [&](int micro_batches) {
    return pipeline::replay(schedule_of(job, micro_batches), stages).makespan;
  };
  // In its steady state a pipeline takes equally long for every p micro-batches
  const int least = 3 * job.pp + m % job.pp;
  if (!job.composes_stages || m <= least + job.pp) return seconds(m);
  const double first = seconds(least), second = seconds(least + job.pp);
  return second + (second - first) * ((m - least) / job.pp - 1);
}

/// Sums (or gathers) over the ranks that have the same parameters.
double gradient_seconds(const HybridJob& job, const sim::CostModel& costs,
                        double parameters, const std::vector<int>& replicas,
                        const StageRun& busiest) {
  if (parameters <= 0) return 0;
  const auto sum = [&](CommOp op, double bytes) {
    return in_buckets(costs, op, bytes, job.bucket_bytes, replicas);
  };
  const double gradients =
      parameters * static_cast<double>(dtype_bytes(job.gradient_dtype));
  const auto exposed = [&](double seconds, double beside) {
    return job.overlaps_gradients ? std::max(0.0, seconds - beside) : seconds;
  };
  if (!job.distributes()) {
    return exposed(sum(CommOp::kAllReduce, gradients), busiest.backward_s);
  }
  const double weights =
      parameters * static_cast<double>(dtype_bytes(job.layout.dtype));
  // Stages 2 and 3 have scattered them after every micro-batch, and 3 gathers
  // the parameters when it needs them
  const double scattered =
      job.zero_stage >= 2 ? 0 : sum(CommOp::kReduceScatter, gradients);
  const double gathered =
      job.zero_stage == 3 ? 0 : sum(CommOp::kAllGather, weights);
  return exposed(scattered, busiest.backward_s) +
         exposed(gathered, busiest.forward_s);
}

/// The part of an update of all parameters that a rank does.
double own_share(const HybridJob& job, const StageRun& run) {
  if (!job.distributes()) return 1;
  const double experts = run.expert_parameters / run.parameters;
  const Ranks ranks(job);
  return (1 - experts) / static_cast<double>(ranks.of_replicas().size()) +
         experts / static_cast<double>(ranks.of_experts(job.layout.ep).size());
}

double tied_seconds(const HybridJob& job, const sim::CostModel& costs) {
  if (!job.is_tied || job.pp == 1) return 0;
  const double bytes =
      static_cast<double>(job.sizes.vocabulary * job.sizes.hidden) /
      job.layout.tp * static_cast<double>(dtype_bytes(job.gradient_dtype));
  const Ranks ranks(job);
  return costs
      .collective(CommOp::kAllReduce, bytes, {0, ranks.at_stage(job.pp - 1)})
      .seconds;
}

}  // namespace

/// Equal stages. Where two layers more would divide, the embedding and the head
/// count as one each: the first stage and the last have a layer less (Llama 3;
/// Megatron-LM's account_for_embedding_in_pipeline_split).
std::vector<StageParts> stages_of(const HybridJob& job) {
  const std::int64_t stages = job.pp * job.chunks;
  if (!job.blocks.empty()) {
    std::vector<StageParts> parts;
    for (const std::int64_t blocks : job.blocks) parts.push_back({blocks});
    SB_CHECK(static_cast<std::int64_t>(parts.size()) == stages, parts.size(),
             " numbers of blocks for ", stages, " stages");
    parts.front().has_embedding = true;
    parts.back().has_head = true;
    return parts;
  }
  const bool is_even = job.layers % stages == 0;
  SB_CHECK(is_even || (job.layers + 2) % stages == 0, job.layers,
           " layers, also with embedding and head counted as layers, do not "
           "divide by ",
           stages, " stages");
  std::vector<StageParts> parts(static_cast<std::size_t>(stages));
  for (StageParts& each : parts) {
    each.blocks = (job.layers + (is_even ? 0 : 2)) / stages;
  }
  if (!is_even) {
    --parts.front().blocks;
    --parts.back().blocks;
  }
  parts.front().has_embedding = true;
  parts.back().has_head = true;
  return parts;
}

StageRun stage_of(const HybridJob& given, const StageParts& parts) {
  HybridJob job = given;
  job.layout.splits_backward = job.is_zero_bubble;
  if (job.overlaps_tensor && job.layout.tp > 1) {
    job.cluster.name += " with overlap";
    job.cluster.intra_node.bytes_per_s *= job.layout.tp;
    job.cluster.intra_node.reduction_bytes_per_s *= job.layout.tp;
  }
  if (job.composes_stages) {
    return composed_stage(job.cluster, job.sizes, job.layout, parts);
  }
  return known_stage(job.cluster, job.sizes, job.layout, parts);
}

std::vector<StageRun> runs_of(const HybridJob& job) {
  const std::vector<StageParts> stages = stages_of(job);
  std::vector<StageRun> runs;
  for (std::size_t i = 0; i < stages.size(); ++i) {
    const bool is_known = i > 0 && stages[i] == stages[i - 1];
    runs.push_back(is_known ? runs.back() : stage_of(job, stages[i]));
  }
  return runs;
}

double parameters_of(const HybridJob& job, const std::vector<StageRun>& runs,
                     int pp_rank) {
  double parameters = 0;
  for (int chunk = 0; chunk < job.chunks; ++chunk) {
    parameters +=
        runs[static_cast<std::size_t>(chunk * job.pp + pp_rank)].parameters;
  }
  if (job.pp == 1 && job.is_tied) {
    // Embedding and head are one table
    parameters -= static_cast<double>(job.sizes.vocabulary * job.sizes.hidden) /
                  job.layout.tp;
  }
  return parameters;
}

HybridStep hybrid_step(const HybridJob& job) {
  SB_CHECK(job.ranks() <= job.cluster.num_devices(), job.cluster.name, " has ",
           job.cluster.num_devices(), " devices for ", job.ranks(), " ranks");
  SB_CHECK(job.zero_stage <= 1 || job.pp == 1, "ZeRO-", job.zero_stage,
           " with ", job.pp, " pipeline stages; give stage 1");
  const sim::CostModel costs(job.cluster);
  const std::vector<StageRun> runs = runs_of(job);
  HybridStep step;
  for (const StageRun& run : runs) step.trust = std::max(step.trust, run.trust);

  // All chunks of a rank reduce and update at the end of the step
  double most_parameters = 0, experts = 0, longest_update = 0, busy = 0;
  StageRun busiest;
  const auto m = static_cast<double>(job.micro_batches);
  for (int rank = 0; rank < job.pp; ++rank) {
    double own_experts = 0, update = 0, forward = 0, backward = 0;
    for (int chunk = 0; chunk < job.chunks; ++chunk) {
      const StageRun& run =
          runs[static_cast<std::size_t>(chunk * job.pp + rank)];
      own_experts += run.expert_parameters;
      update += run.optimizer_s * own_share(job, run);
      forward += run.forward_s;
      backward += run.backward_s;
      busy += m * run.busy_s / job.pp;
    }
    const double parameters = parameters_of(job, runs, rank);
    if (parameters > most_parameters) {
      most_parameters = parameters;
      experts = own_experts;
      busiest.forward_s = forward;
      busiest.backward_s = backward;
    }
    longest_update = std::max(longest_update, update);
  }
  step.pipeline_s = pipeline_seconds(job, costs, runs);
  const Ranks ranks(job);
  step.gradients_s =
      gradient_seconds(job, costs, most_parameters - experts,
                       ranks.of_replicas(), busiest) +
      gradient_seconds(job, costs, experts, ranks.of_experts(job.layout.ep),
                       busiest) +
      tied_seconds(job, costs);
  const double own = most_parameters / (job.distributes() ? job.replicas() : 1);
  step.optimizer_s =
      job.offloads ? update_on_host_seconds(job, costs, own) : longest_update;
  step.seconds = step.pipeline_s + step.gradients_s + step.optimizer_s;
  busy += job.offloads ? 0 : step.optimizer_s;
  step.idle_share = std::max(0.0, 1 - busy / step.seconds);
  step.sent_bytes = sent_bytes(job, costs, runs);
  return step;
}

}  // namespace shardbook::planner
