#include "chapters/planner/step.h"

#include <algorithm>
#include <vector>

#include "chapters/06_1f1b/schedules.h"
#include "chapters/common/pipeline/replay.h"
#include "chapters/planner/step_parts.h"
#include "core/check.h"
#include "core/how_many.h"
#include "sim/cost_model.h"

namespace shardbook::planner {
namespace {

/// Seconds from one rank of the pipeline to the next. Every rank of tp sends
/// its part; if all need the whole, they gather it afterwards (Narayanan et al.
/// 2021, section 4.1).
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

/// By rank: the mean of its messages to the next and to the previous rank.
std::vector<double> messages_of_ranks(const HybridJob& job,
                                      const sim::CostModel& costs) {
  std::vector<double> next;
  for (int rank = 0; rank < job.pp; ++rank) {
    // Only with chunks, the last rank sends to the first
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

/// Seconds that no order of a pipeline's actions can beat: a rank waits for the
/// first micro-batch, does its work, and the last backward goes back.
double work_seconds(const HybridJob& job, const std::vector<StageRun>& runs) {
  // A repeated steady state may be shorter than a replay by this share
  constexpr double kShare = 0.99;
  const auto of = [&](const StageRun& run) {
    return run.forward_s + (job.is_zero_bubble
                                ? run.backward_input_s + run.backward_weight_s
                                : run.backward_s);
  };
  const auto p = static_cast<std::size_t>(job.pp);
  std::vector<double> own(p);
  for (std::size_t i = 0; i < runs.size(); ++i) own[i % p] += of(runs[i]);
  double slowest = 0, around = 0;
  for (std::size_t rank = 0; rank < p; ++rank) {
    slowest = std::max(
        slowest, static_cast<double>(job.micro_batches) * own[rank] + around);
    // Zero bubble fills the wait for its last gradients with those of weights
    around += job.is_zero_bubble ? runs[rank].forward_s : of(runs[rank]);
  }
  return kShare * slowest;
}

double pipeline_seconds(const HybridJob& job, const sim::CostModel& costs,
                        const std::vector<StageRun>& runs, double limit_s) {
  const auto m = static_cast<int>(job.micro_batches);
  if (job.pp == 1) {
    const StageRun& run = runs[0];
    if (job.zero_stage >= 2) return zero_seconds(job, costs, run);
    const double each = run.forward_s + run.backward_s;
    return job.is_synchronous ? m * each : each + (m - 1) * run.both_s;
  }
  const double work = work_seconds(job, runs);
  if (work >= limit_s) return work;
  std::vector<pipeline::Costs> stages;
  const std::vector<double> messages = messages_of_ranks(job, costs);
  for (const StageRun& run : runs) {
    stages.push_back(
        {.forward = run.forward_s,
         .backward = run.backward_s,
         .backward_input = run.backward_input_s,
         .backward_weight = run.backward_weight_s,
         .communication = messages[stages.size() % messages.size()]});
  }
  const auto seconds = [&](int micro_batches) {
    const auto of_stage = [&](int stage, int) {
      return stages[static_cast<std::size_t>(stage)];
    };
    return pipeline::replay(schedule_of(job, micro_batches), of_stage).makespan;
  };
  // In its steady state a pipeline takes equally long for every p micro-batches
  const int least = 3 * job.pp + m % job.pp;
  if (!job.composes_stages || m <= least + job.pp) return seconds(m);
  const double first = seconds(least), second = seconds(least + job.pp);
  return second + (second - first) * ((m - least) / job.pp - 1);
}

/// Seconds of sums (or gathers) over the ranks with the same parameters.
double gradient_seconds(const HybridJob& job, const sim::CostModel& costs,
                        double parameters, const std::vector<int>& replicas,
                        const StageRun& busiest) {
  if (parameters <= 0) return 0;
  const auto sum = [&](CommOp op, double bytes) {
    return in_buckets(costs, op, bytes, job.bucket_bytes, replicas);
  };
  const double gradients = parameters * job.gradient();
  const auto exposed = [&](double seconds, double beside) {
    return job.overlaps_gradients ? std::max(0.0, seconds - beside) : seconds;
  };
  if (job.zero_stage == 0) {
    return exposed(sum(CommOp::kAllReduce, gradients), busiest.backward_s);
  }
  const double weights = parameters * job.element();
  // Stages 2 and 3 have already scattered gradients after every micro-batch,
  // and stage 3 gathers parameters when needed
  const double scattered =
      job.zero_stage >= 2 ? 0 : sum(CommOp::kReduceScatter, gradients);
  const double gathered =
      job.zero_stage == 3 ? 0 : sum(CommOp::kAllGather, weights);
  return exposed(scattered, busiest.backward_s) +
         exposed(gathered, busiest.forward_s);
}

double tied_seconds(const HybridJob& job, const sim::CostModel& costs) {
  if (!job.is_tied || job.pp == 1) return 0;
  return costs
      .collective(CommOp::kAllReduce, job.table() * job.gradient(),
                  {0, Ranks(job).at_stage(job.pp - 1)})
      .seconds;
}

}  // namespace

HybridStep hybrid_step(const HybridJob& job, double limit_s) {
  SB_CHECK(job.ranks() <= job.cluster.num_devices(), job.cluster.name, " has ",
           how_many(job.cluster.num_devices(), "device"), " for ",
           how_many(job.ranks(), "rank"));
  SB_CHECK(job.zero_stage <= 1 || job.pp == 1, "ZeRO-", job.zero_stage,
           " with ", job.pp, " pipeline stages; give stage 1");
  const sim::CostModel costs(job.cluster);
  const std::vector<StageRun> runs = runs_of(job), ranks = ranks_of(job, runs);
  HybridStep step;
  double longest_update = 0, busy = 0;
  const StageRun* fullest = &ranks[0];
  for (const StageRun& rank : ranks) {
    step.trust = std::max(step.trust, rank.trust);
    busy += static_cast<double>(job.micro_batches) * rank.busy_s / job.pp;
    longest_update = std::max(longest_update, rank.optimizer_s);
    if (rank.parameters > fullest->parameters) fullest = &rank;
  }
  // All chunks of a rank reduce and update at the end of the step
  const double experts = fullest->expert_parameters;
  const Ranks groups(job);
  step.gradients_s =
      gradient_seconds(job, costs, fullest->parameters - experts,
                       groups.of_replicas(), *fullest) +
      gradient_seconds(job, costs, experts, groups.of_experts(), *fullest) +
      tied_seconds(job, costs);
  step.optimizer_s = job.offloads
                         ? update_on_host_seconds(
                               job, costs, fullest->parameters / job.replicas())
                         : longest_update;
  step.pipeline_s = pipeline_seconds(
      job, costs, runs, limit_s - step.gradients_s - step.optimizer_s);
  step.seconds = step.pipeline_s + step.gradients_s + step.optimizer_s;
  busy += job.offloads ? 0 : step.optimizer_s;
  step.idle_share = std::max(0.0, 1 - busy / step.seconds);
  step.sent_bytes = sent_bytes(job, costs, ranks);
  return step;
}

// --- Memory ------------------------------------------------------------------

int live_sets(const HybridJob& job, int pp_rank) {
  const int p = job.pp, v = job.chunks;
  const auto m = static_cast<int>(job.micro_batches);
  if (job.is_zero_bubble) return std::min(p, m);
  if (v == 1) return std::min(p - pp_rank, m);
  return std::min(2 * (p - pp_rank - 1) + (v - 1) * p + 1, m * v);
}

// Adam, with f32 copies of 16-bit parameters
zero::ModelStates HybridJob::states(double parameters, double experts) const {
  const zero::StateBytes bytes = zero::state_bytes(layout.dtype, "adamw", {});
  zero::ModelStates all =
      zero::model_states(zero_stage, parameters - experts, replicas(), bytes);
  if (experts == 0) return all;
  const auto copies = static_cast<int>(Ranks(*this).of_experts().size());
  const zero::ModelStates more =
      zero::model_states(zero_stage, experts, copies, bytes);
  all.parameters += more.parameters;
  all.gradients += more.gradients;
  all.optimizer += more.optimizer;
  return all;
}

StepMemory step_memory(const HybridJob& job) {
  SB_CHECK(job.layout.recompute != Recompute::kEverySecondProduct,
           "the memory of blocks that compute every second product again is "
           "not predicted");
  const std::vector<StageRun> runs = runs_of(job), ranks = ranks_of(job, runs);
  const double element = job.element(), table = job.table();
  const int stage = job.zero_stage;
  StepMemory most;
  for (int rank = 0; rank < job.pp; ++rank) {
    const StageRun& run = ranks[static_cast<std::size_t>(rank)];
    const zero::ModelStates states =
        job.states(run.parameters, run.expert_parameters);
    StepMemory memory;
    memory.parameters = states.parameters;
    memory.gradients = states.gradients;
    memory.optimizer = states.optimizer;
    memory.messages = run.message_bytes;
    memory.activations =
        (live_sets(job, rank) - 1) * run.kept_bytes +
        std::max(run.forward_peak_bytes, run.backward_peak_bytes);
    const double block = stage >= 2 ? block_elements(job, runs[0]) : 0;
    if (stage <= 1) {
      memory.gradients +=
          job.micro_batches > 1 ? run.passing_gradient_bytes : 0;
    } else {
      // Temporary gradients: the largest of a block's matrices, and the head's
      // gradient of the table. That waits for the embedding's, if they share the
      // table; else stage 2 sends it at once
      const bool waits = job.is_tied || stage == 3;
      memory.gradients +=
          element * ((waits ? table : 0) + largest_matrix(job, block));
    }
    if (stage == 3) {
      // Gathered: the table and a block; the next block counts as a message
      memory.parameters += element * (table + block);
      memory.messages += 2 * element * block;
      // Behind a head with a table of its own, the last block's parameters come
      // while the head's are still there, and those before them for its second
      // forward
      if (!job.is_tied && job.layout.recompute == Recompute::kBlocks) {
        memory.messages += 2 * element * block;
      }
    } else {
      memory.messages += stage * job.bucket_bytes;
    }
    if (job.offloads) {
      const double shards = stage == 3 ? states.parameters : 0;
      memory.host = states.optimizer + states.gradients + shards;
      memory.optimizer = 0;
      memory.gradients -= states.gradients;
      memory.parameters -= shards;
    }
    if (memory.total() > most.total()) most = memory;
  }
  return most;
}

}  // namespace shardbook::planner
