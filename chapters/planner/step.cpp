#include "chapters/planner/step.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "chapters/06_1f1b/schedules.h"
#include "chapters/common/pipeline/replay.h"
#include "chapters/planner/rank_update.h"
#include "chapters/planner/step_parts.h"
#include "chapters/planner/zero_run.h"
#include "core/check.h"
#include "core/how_many.h"
#include "sim/cost_model.h"

namespace shardbook::planner {
namespace {

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

/// A pipeline and what its ranks do behind it. All wait for the norm.
void time_with_updates(const HybridJob& job, const sim::CostModel& costs,
                       const std::vector<StageRun>& runs, double limit_s,
                       HybridStep& step) {
  const std::vector<RankUpdate>& updates = rank_updates(job, costs, runs);
  double least = kNoLimit, tied = 0;
  const RankUpdate* longest = nullptr;
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
    // The device may wait for the host
    const double squares =
        std::max(each.squares, each.issues - time.ahead[rank] - each.sums);
    const double end = each.sums + squares - time.early[rank];
    if (end <= last) continue;
    last = end;
    step.gradients_s = each.sums - time.early[rank];
    step.optimizer_s = squares;
  }
  step.gradients_s += tied + longest->gathers;
  // Nothing is behind the pipeline where a rank that ends early sums last
  step.pipeline_s = time.seconds + std::min(0.0, step.gradients_s);
  step.gradients_s = std::max(0.0, step.gradients_s);
  step.optimizer_s += longest->update;
}

/// What the rank with most work does during pipeline_s.
void share_out(const HybridJob& job, const std::vector<StageRun>& runs,
               const std::vector<StageRun>& ranks, HybridStep& step) {
  const std::vector<double> own = work_of_ranks(job, runs);
  const auto busiest = std::max_element(own.begin(), own.end());
  const auto m = static_cast<double>(job.micro_batches);
  const bool waits = job.pp > 1 || job.zero_stage >= 2;
  const double work =
      waits ? std::min(m * *busiest, step.pipeline_s) : step.pipeline_s;
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
  if (job.is_of_chapter() && job.zero_stage <= 1) {
    time_with_updates(job, costs, runs, limit_s, step);
  } else if (job.runs_zero()) {
    step.pipeline_s =
        zero_run(job).step_s - step.gradients_s - step.optimizer_s;
  } else {
    step.pipeline_s =
        pipeline_time(job, costs, runs,
                      limit_s - step.gradients_s - step.optimizer_s)
            .seconds;
  }
  if (job.offloads && job.is_of_chapter() && job.ranks() > 1) {
    // Messages with the host make no step shorter
    HybridJob on_devices = job;
    on_devices.offloads = false;
    step.pipeline_s =
        std::max(step.pipeline_s, zero_run(on_devices).step_s -
                                      step.gradients_s - step.optimizer_s);
  }
  step.seconds = step.pipeline_s + step.gradients_s + step.optimizer_s;
  share_out(job, runs, ranks, step);
  busy += job.offloads ? 0 : step.optimizer_s;
  step.idle_share = std::max(0.0, 1 - busy / step.seconds);
  for (const SentTerm& each : sent_terms(job, costs, ranks)) {
    step.sent_bytes[each.link] += each.bytes();
  }
  return step;
}

double least_stage_seconds(const HybridJob& job, bool blocks_alone) {
  StageLayout layout = job.layout;
  layout.splits_backward = job.is_zero_bubble;
  const std::vector<StageParts> stages = stages_of(job);
  const auto pp = static_cast<std::size_t>(job.pp);
  double most = 0;
  for (std::size_t rank = 0; rank < pp; ++rank) {
    double each = 0, added = 0;
    const sim::Cluster& cluster =
        cluster_from(job.cluster, job, static_cast<int>(rank));
    for (std::size_t i = rank; i < stages.size(); i += pp) {
      StageParts parts = stages[i];
      if (blocks_alone) {
        if (parts.blocks == 0) continue;
        parts.has_embedding = parts.has_head = parts.is_tied = false;
      }
      const StageRun run = composed_stage(cluster, job.sizes, layout, parts);
      each += run.forward_ahead.device_s +
              (job.is_zero_bubble ? run.backward_input_ahead.device_s +
                                        run.backward_weight_ahead.device_s
                                  : run.backward_ahead.device_s);
      // A first gradient is added to no other
      added +=
          job.is_zero_bubble
              ? run.backward_input_ahead.device_s -
                    run.first_backward_input_ahead.device_s +
                    run.backward_weight_ahead.device_s -
                    run.first_backward_weight_ahead.device_s
              : run.backward_ahead.device_s - run.first_backward_ahead.device_s;
    }
    most =
        std::max(most, static_cast<double>(job.micro_batches) * each - added);
    // Others are as long, or have a block less, up to the last
    if (rank > 0 && rank + 2 < pp && stages[rank] == stages[rank - 1]) {
      rank = pp - 2;
    }
  }
  return 0.99 * most;  // a repeated steady state may be shorter by this
}

}  // namespace shardbook::planner
