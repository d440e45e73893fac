#include "chapters/planner/step.h"

#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>
#include <vector>

#include "chapters/planner/step_parts.h"
#include "core/check.h"
#include "core/context.h"
#include "core/how_many.h"

namespace shardbook::planner {

// Buckets of one kind are filled after the other, as ddp::assign_buckets does.
std::vector<SentBucket> buckets_of(const HybridJob& job,
                                   const std::vector<StageRun>& runs,
                                   int rank) {
  // Experts are summed over other ranks
  const bool sums_apart = job.layout.ep > 1 || job.layout.tp > 1;
  std::vector<std::vector<SentBucket>> kinds;
  const auto add = [&](const std::vector<ParameterSize>& sizes) {
    for (const ParameterSize& each : sizes) {
      const SentBucket empty = {0,
                                {},
                                each.is_expert && sums_apart,
                                each.is_whole,
                                each.is_partial,
                                each.is_table && job.is_tied && job.pp > 1};
      auto kind = std::find_if(kinds.begin(), kinds.end(), [&](const auto& of) {
        return of.front().kind() == empty.kind();
      });
      if (kind == kinds.end()) {
        kind = kinds.insert(kind, {empty});
      } else if (kind->back().elements * job.element() >= job.bucket_bytes) {
        kind->push_back(empty);
      }
      kind->back().elements += each.elements;
      kind->back().parameters.push_back(each.elements);
    }
  };
  for (std::size_t i = static_cast<std::size_t>(rank); i < runs.size();
       i += static_cast<std::size_t>(job.pp)) {
    const ParameterSizes& sizes = runs[i].sizes;
    add(sizes.embedding);
    for (std::int64_t b = 0; b < sizes.blocks; ++b) add(sizes.of_block(b));
    add(sizes.head);
  }
  std::vector<SentBucket> all;
  for (const auto& kind : kinds)
    all.insert(all.end(), kind.begin(), kind.end());
  return all;
}

bool has_stages_of(const HybridJob& job, const std::vector<StageRun>& runs,
                   int rank, int other) {
  const auto p = static_cast<std::size_t>(job.pp);
  const auto is_like = [](const StageRun& a, const StageRun& b) {
    return a.sizes.blocks == b.sizes.blocks && a.sizes.dense == b.sizes.dense &&
           a.sizes.embedding.empty() == b.sizes.embedding.empty() &&
           a.sizes.head.empty() == b.sizes.head.empty();
  };
  for (std::size_t i = 0; i < runs.size(); i += p) {
    if (!is_like(runs[i + static_cast<std::size_t>(rank)],
                 runs[i + static_cast<std::size_t>(other)])) {
      return false;
    }
  }
  return true;
}

namespace {

/// What a rank does behind its last backward, as the hybrid chapter does: it sums
/// gradients in buckets over the ranks with the same parameters, parts of sums over
/// tp, and a tied table over two stages; then it squares and updates, and with
/// ZeRO-1 gathers parameters. Seconds, one after the other.
struct RankUpdate {
  double sums = 0;     ///< over dp and cp, then over tp
  double tied = 0;     ///< over the first and the last stage
  double squares = 0;  ///< for the norm, with its sum over all ranks
  double issues = 0;   ///< of the host, for sums and squares
  double update = 0;
  double gathers = 0;
};

class Updates {
 public:
  Updates(const HybridJob& job, const sim::CostModel& costs)
      : job_(job), costs_(costs) {
    std::vector<int> world(static_cast<std::size_t>(job.ranks()));
    std::iota(world.begin(), world.end(), 0);
    norm_s_ = costs.collective(CommOp::kAllReduce, 16, world).seconds;
  }

  /// The next updates are of this rank of the pipeline.
  void go_to(int pp_rank) {
    const int count = job_.layout.tp * job_.replicas();
    const int place = place_of(job_, pp_rank, count);
    if (place == std::exchange(place_, place)) return;
    const Ranks groups(job_, pp_rank);
    groups_ = {groups.of_replicas(),
               groups.of_experts(),
               groups.of_tp(),
               {0, groups.at_stage(job_.pp - 1)}};
    known_.clear();
  }
  int place() const { return place_; }

  RankUpdate of(const std::vector<SentBucket>& buckets) {
    const bool is_sharded = job_.zero_stage == 1;
    const double element = job_.element(), gradient = job_.gradient();
    RankUpdate times;
    double updates = 0, issues = 0;
    const auto update = [&](double elements) {
      times.squares += kernel("sum_of_squares", elements * gradient);
      times.update += kernel("adamw", elements * (2 * element + gradient + 16));
      updates += 1;
      issues += 1;
    };
    for (const SentBucket& bucket : buckets) {
      const Group same = bucket.is_expert ? kExperts : kReplicas;
      const auto ranks = static_cast<double>(groups_[same].size());
      const double bytes = bucket.elements * gradient;
      double own = bucket.elements;
      if (is_sharded) {
        own /= ranks;
        issues += 3;
        // A rank alone copies
        times.sums += pack(bytes) +
                      (ranks > 1 ? message(same, CommOp::kReduceScatter, bytes)
                                 : kernel("copy", 2 * bytes));
        times.gathers +=
            message(same, CommOp::kAllGather, bucket.elements * element);
        update(own);
      } else {
        times.sums += sum(same, bytes);
        if (ranks > 1) issues += 4;
        for (const double each : bucket.parameters) update(each);
      }
      if (bucket.is_partial) times.sums += sum(kTensor, own * gradient);
      if (bucket.is_tied) times.tied += sum(kEnds, own * gradient);
    }
    times.issues = issues * costs_.cluster().device.launch_s;
    // The host has waited for the norm
    times.update =
        std::max(times.update, updates * costs_.cluster().device.launch_s);
    times.squares += norm_s_;
    return times;
  }

 private:
  enum Group { kReplicas, kExperts, kTensor, kEnds, kNumGroups };

  double kernel(const char* name, double bytes) const {
    OpEvent event{};
    event.name = name;
    event.bytes = bytes;
    event.phase = Phase::kOptimizer;
    return costs_.operation(event).seconds;
  }
  /// Equal messages take equally long.
  double message(Group group, CommOp op, double bytes) {
    if (groups_[group].size() == 1) return 0;
    const auto [found, is_new] = known_.try_emplace({group, op, bytes});
    if (is_new) {
      found->second = costs_.collective(op, bytes, groups_[group]).seconds;
    }
    return found->second;
  }
  /// Zeros, and a copy to the message.
  double pack(double bytes) const {
    return kernel("fill", bytes) + kernel("copy", 2 * bytes);
  }
  double sum(Group group, double bytes) {
    if (groups_[group].size() == 1) return 0;
    return pack(bytes) + message(group, CommOp::kAllReduce, bytes) +
           kernel("copy", 2 * bytes);
  }

  const HybridJob& job_;
  const sim::CostModel& costs_;
  std::array<std::vector<int>, kNumGroups> groups_;
  double norm_s_ = 0;
  int place_ = -1;  ///< of groups_
  std::map<std::tuple<Group, CommOp, double>, double> known_;
};

/// Of all ranks of the pipeline, computed once for jobs with the same parameters.
/// Stages 0 and 1.
const std::vector<RankUpdate>& rank_updates(const HybridJob& job,
                                            const sim::CostModel& costs,
                                            const std::vector<StageRun>& runs) {
  // Not by what memory and time of a micro-batch depend on: many plans share these
  const auto key = std::make_tuple(
      job.cluster.name, job.cluster.device.sustained, job.sizes.key(),
      job.layout.tp, job.layout.cp, job.layout.ep, job.layout.cuts_tokens,
      job.layout.dtype, job.gradient_dtype, job.pp, job.dp, job.chunks,
      job.blocks, job.zero_stage, job.bucket_bytes, job.is_tied);
  return once_for(key, [&] {
    std::vector<RankUpdate> all;
    Updates updates(job, costs);
    for (int rank = 0; rank < job.pp; ++rank) {
      const int place = updates.place();
      updates.go_to(rank);
      const bool is_like = updates.place() == place && rank > 0 &&
                           has_stages_of(job, runs, rank, rank - 1);
      all.push_back(is_like ? all.back()
                            : updates.of(buckets_of(job, runs, rank)));
    }
    return all;
  });
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
    return exposed(sum(CommOp::kAllReduce, gradients), busiest.backward.s);
  }
  const double weights = parameters * job.element();
  // Stages 2 and 3 have already scattered gradients after every micro-batch,
  // and stage 3 gathers parameters when needed
  const double scattered =
      job.zero_stage >= 2 ? 0 : sum(CommOp::kReduceScatter, gradients);
  const double gathered =
      job.zero_stage == 3 ? 0 : sum(CommOp::kAllGather, weights);
  return exposed(scattered, busiest.backward.s) +
         exposed(gathered, busiest.forward.s);
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
      gradient_seconds(job, costs, experts, groups.of_experts(), *fullest);
  if (job.is_tied && job.pp > 1) {
    const std::vector<int> ends = {0, groups.at_stage(job.pp - 1)};
    const double bytes = job.table() * job.gradient();
    step.gradients_s +=
        costs.collective(CommOp::kAllReduce, bytes, ends).seconds;
  }
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
      double backward = 0;
      for (const auto& [next, first] : run.backwards(job.is_zero_bubble)) {
        backward += next.device_s;
        // A first gradient is added to no other
        added += next.device_s - first.device_s;
      }
      each += run.forward.device_s + backward;
    }
    most =
        std::max(most, static_cast<double>(job.micro_batches) * each - added);
    // Others are as long, or have a block less, up to the last
    if (rank > 0 && rank + 2 < pp &&
        stages[rank].key() == stages[rank - 1].key()) {
      rank = pp - 2;
    }
  }
  return 0.99 * most;  // a repeated steady state may be shorter by this
}

}  // namespace shardbook::planner
