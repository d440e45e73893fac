#include "chapters/planner/step.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "chapters/06_1f1b/schedules.h"
#include "chapters/common/pipeline/replay.h"
#include "chapters/planner/rank_update.h"
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

/// Seconds of a micro-batch on a stage.
double work_seconds(const HybridJob& job, const StageRun& run) {
  return run.forward_s + (job.is_zero_bubble
                              ? run.backward_input_s + run.backward_weight_s
                              : run.backward_s);
}

/// The same of all stages of each rank.
std::vector<double> work_of_ranks(const HybridJob& job,
                                  const std::vector<StageRun>& runs) {
  const auto p = static_cast<std::size_t>(job.pp);
  std::vector<double> own(p);
  for (std::size_t i = 0; i < runs.size(); ++i) {
    own[i % p] += work_seconds(job, runs[i]);
  }
  return own;
}

/// Seconds that no order of a pipeline's actions can beat: a rank waits for the
/// first micro-batch, does its work, and the last backward goes back.
double least_pipeline_seconds(const HybridJob& job,
                              const std::vector<StageRun>& runs) {
  // A repeated steady state may be shorter than a replay by this share
  constexpr double kShare = 0.99;
  const std::vector<double> own = work_of_ranks(job, runs);
  double slowest = 0, around = 0;
  for (std::size_t rank = 0; rank < own.size(); ++rank) {
    slowest = std::max(
        slowest, static_cast<double>(job.micro_batches) * own[rank] + around);
    // Zero bubble fills the wait for its last gradients with those of weights
    around += job.is_zero_bubble ? runs[rank].forward_s
                                 : work_seconds(job, runs[rank]);
  }
  return kShare * slowest;
}

/// Of a pipeline: its seconds, and by how much each rank ends before.
struct PipelineTime {
  double seconds = 0;
  std::vector<double> early = {0};
};

PipelineTime pipeline_time(const HybridJob& job, const sim::CostModel& costs,
                           const std::vector<StageRun>& runs, double limit_s) {
  const auto m = static_cast<int>(job.micro_batches);
  if (job.pp == 1) {
    const StageRun& run = runs[0];
    if (job.zero_stage >= 2) return {zero_seconds(job, costs, run)};
    const double each = run.forward_s + run.backward_s;
    return {job.is_synchronous ? m * each : each + (m - 1) * run.both_s};
  }
  const double work = least_pipeline_seconds(job, runs);
  const auto p = static_cast<std::size_t>(job.pp);
  if (work >= limit_s) return {work, std::vector<double>(p)};
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
  const auto replayed = [&](int micro_batches) {
    const auto of_stage = [&](int stage, int) {
      return stages[static_cast<std::size_t>(stage)];
    };
    const pipeline::Replay all =
        pipeline::replay(schedule_of(job, micro_batches), of_stage);
    PipelineTime time = {all.makespan, {}};
    for (const auto& spans : all.spans) {
      time.early.push_back(all.makespan - spans.back().end);
    }
    return time;
  };
  // In its steady state a pipeline takes equally long for every p micro-batches
  const int least = 3 * job.pp + m % job.pp;
  if (!job.composes_stages || m <= least + job.pp) return replayed(m);
  const double first = replayed(least).seconds;
  PipelineTime time = replayed(least + job.pp);
  time.seconds += (time.seconds - first) * ((m - least) / job.pp - 1);
  return time;
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

/// Whether the hybrid chapter's Update ends the step.
bool is_of_chapter(const HybridJob& job) {
  return job.zero_stage <= 1 && job.bucket_bytes > 0;
}

/// A pipeline and what its ranks do behind it. All wait for the norm.
void time_with_updates(const HybridJob& job, const sim::CostModel& costs,
                       const std::vector<StageRun>& runs, double limit_s,
                       HybridStep& step) {
  std::vector<RankUpdate> updates;
  double least = kNoLimit, tied = 0;
  const RankUpdate* longest = nullptr;
  for (int rank = 0; rank < job.pp; ++rank) {
    updates.push_back(rank_update(job, costs, buckets_of(job, runs, rank)));
  }
  for (const RankUpdate& each : updates) {
    least = std::min(least, each.sums + each.squares);
    tied = std::max(tied, each.tied);
    if (longest == nullptr ||
        each.update + each.gathers > longest->update + longest->gathers) {
      longest = &each;
    }
  }
  const double behind = tied + longest->update + longest->gathers;
  const PipelineTime time =
      pipeline_time(job, costs, runs, limit_s - least - behind);
  double last = -kNoLimit;
  for (std::size_t rank = 0; rank < updates.size(); ++rank) {
    const RankUpdate& each = updates[rank];
    const double end = each.sums + each.squares - time.early[rank];
    if (end <= last) continue;
    last = end;
    step.gradients_s = each.sums - time.early[rank];
    step.optimizer_s = each.squares;
  }
  step.pipeline_s = time.seconds;
  step.gradients_s += tied + longest->gathers;
  step.optimizer_s += longest->update;
}

/// What the rank with most work does during pipeline_s.
void share_out(const HybridJob& job, const std::vector<StageRun>& runs,
               const std::vector<StageRun>& ranks, HybridStep& step) {
  const std::vector<double> own = work_of_ranks(job, runs);
  const auto busiest = std::max_element(own.begin(), own.end());
  const auto m = static_cast<double>(job.micro_batches);
  const bool waits = job.pp > 1 || job.zero_stage >= 2;
  const double work = waits ? m * *busiest : step.pipeline_s;
  const auto rank = static_cast<std::size_t>(busiest - own.begin());
  step.compute_s = m * ranks[rank].busy_s;
  step.layers_s = work - step.compute_s;
  step.waits_s = step.pipeline_s - work;
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
  step.largest_parameters = fullest->parameters;
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
  if (is_of_chapter(job)) {
    time_with_updates(job, costs, runs, limit_s, step);
  } else {
    step.pipeline_s =
        pipeline_time(job, costs, runs,
                      limit_s - step.gradients_s - step.optimizer_s)
            .seconds;
  }
  step.seconds = step.pipeline_s + step.gradients_s + step.optimizer_s;
  share_out(job, runs, ranks, step);
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

namespace {

constexpr char kOfStates[] = "03_zero_fsdp/README.md#the-problem";
constexpr char kOfShards[] = "03_zero_fsdp/details.md#memory";

/// Adds up the memory of one rank.
class RankMemory {
 public:
  explicit RankMemory(const HybridJob& job) : job_(job) {}

  void add(double StepMemory::*kind, const MemoryTerm& term) {
    if (term.bytes() == 0) return;
    sum.*kind += term.bytes();
    terms.push_back(term);
    terms.back().kind = kind;
  }
  /// The ZeRO chapter's table of `parameters`, of which `experts` are in experts;
  /// a host has what an offload leaves there.
  void add_states(const char* what, double parameters, double experts) {
    const zero::ModelStates own = job_.states(parameters, experts);
    const zero::StateBytes each =
        zero::state_bytes(job_.layout.dtype, "adamw", {});
    const auto add_state = [&](double StepMemory::*kind, double bytes,
                               double sum, bool is_on_host) {
      if (sum == 0) return;
      add(is_on_host ? &StepMemory::host : kind,
          {what, kOfStates, parameters, bytes,
           std::round(parameters * bytes / sum)});
    };
    const bool offloads = job_.offloads;
    add_state(&StepMemory::parameters, each.parameter, own.parameters,
              offloads && job_.zero_stage == 3);
    add_state(&StepMemory::gradients, each.gradient, own.gradients, offloads);
    add_state(&StepMemory::optimizer, each.optimizer, own.optimizer, offloads);
  }

  StepMemory sum;
  std::vector<MemoryTerm> terms;

 private:
  const HybridJob& job_;
};

RankMemory memory_of_rank(const HybridJob& job, const StageRun& run, int live,
                          double block) {
  const double element = job.element(), table = job.table();
  const int stage = job.zero_stage;
  RankMemory memory(job);
  memory.add_states("parameters", run.parameters - run.expert_parameters, 0);
  memory.add_states("parameters of experts", run.expert_parameters,
                    run.expert_parameters);
  memory.add(&StepMemory::activations,
             {"sets that wait for their backward", "06_1f1b/README.md#the-idea",
              live - 1.0, run.kept_bytes});
  memory.add(&StepMemory::activations,
             {"the peak of the set in work",
              "00_single_device/details.md#the-bill-line-by-line", 1,
              std::max(run.forward_peak_bytes, run.backward_peak_bytes)});
  memory.add(&StepMemory::messages,
             {"inside the layers", page_of_layers(job), 1, run.message_bytes});
  if (stage <= 2) {
    memory.add(&StepMemory::messages,
               {"buckets", "03_zero_fsdp/details.md#reduce",
                static_cast<double>(stage), job.bucket_bytes});
  }
  if (stage <= 1) {
    if (job.micro_batches == 1) return memory;
    memory.add(&StepMemory::gradients,
               {"new ones before they are added",
                "00_single_device/details.md#micro-batches", 1,
                run.passing_gradient_bytes});
    return memory;
  }
  // Temporary gradients: the largest of a block's matrices, and the head's
  // gradient of the table. That waits for the embedding's, if they share the
  // table; else stage 2 sends it at once
  const bool waits = job.is_tied || stage == 3;
  memory.add(
      &StepMemory::gradients,
      {waits ? "elements of the table and of a block's largest matrix"
             : "elements of a block's largest matrix",
       kOfShards, (waits ? table : 0) + largest_matrix(job, block), element});
  if (stage == 2) return memory;
  // Gathered: the table and a block; the next block counts as a message. Behind a
  // head with a table of its own, the last block's parameters come while the
  // head's are still there, and those before them for its second forward
  memory.add(&StepMemory::parameters,
             {"elements of the table and of a block, gathered", kOfShards,
              table + block, element});
  const bool has_more =
      !job.is_tied && job.layout.recompute == Recompute::kBlocks;
  memory.add(&StepMemory::messages,
             {"elements of blocks that are gathered ahead", kOfShards,
              (has_more ? 4 : 2) * block, element});
  return memory;
}

}  // namespace

StepMemory step_memory(const HybridJob& job, std::vector<MemoryTerm>* terms) {
  SB_CHECK(job.layout.recompute != Recompute::kEverySecondProduct,
           "the memory of blocks that compute every second product again is "
           "not predicted");
  const std::vector<StageRun> runs = runs_of(job), ranks = ranks_of(job, runs);
  const double block = job.zero_stage >= 2 ? block_elements(job, runs[0]) : 0;
  StepMemory most;
  for (int rank = 0; rank < job.pp; ++rank) {
    const RankMemory memory =
        memory_of_rank(job, ranks[static_cast<std::size_t>(rank)],
                       live_sets(job, rank), block);
    if (memory.sum.total() <= most.total()) continue;
    most = memory.sum;
    if (terms != nullptr) *terms = memory.terms;
  }
  return most;
}

}  // namespace shardbook::planner
