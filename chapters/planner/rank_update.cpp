#include "chapters/planner/rank_update.h"

#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>

#include "chapters/planner/step_parts.h"
#include "core/context.h"

namespace shardbook::planner {
namespace {

/// Fills buckets of one kind after the other, as ddp::assign_buckets does.
class BucketMaker {
 public:
  explicit BucketMaker(const HybridJob& job)
      : job_(job), sums_apart_(job.layout.ep > 1 || job.layout.tp > 1) {}

  void add(const ParameterSize& each) {
    Kind& kind = kind_of(each, each.is_table && job_.is_tied && job_.pp > 1);
    if (kind.is_full) kind.buckets.push_back(kind.empty);
    kind.buckets.back().elements += each.elements;
    kind.buckets.back().parameters.push_back(each.elements);
    kind.is_full =
        kind.buckets.back().elements * job_.element() >= job_.bucket_bytes;
  }

  std::vector<SentBucket> all() const {
    std::vector<SentBucket> all;
    for (const Kind& kind : kinds_) {
      all.insert(all.end(), kind.buckets.begin(), kind.buckets.end());
    }
    return all;
  }

 private:
  struct Kind {
    std::array<bool, 4> is;
    SentBucket empty;
    std::vector<SentBucket> buckets;
    bool is_full = true;
  };

  Kind& kind_of(const ParameterSize& each, bool is_tied) {
    const bool is_expert = each.is_expert && sums_apart_;
    const std::array<bool, 4> is = {is_expert, each.is_whole, each.is_partial,
                                    is_tied};
    for (Kind& kind : kinds_) {
      if (kind.is == is) return kind;
    }
    kinds_.push_back({is, {0, {}, is_expert, each.is_partial, is_tied}, {}});
    return kinds_.back();
  }

  const HybridJob& job_;
  const bool sums_apart_;  ///< experts over other ranks
  std::vector<Kind> kinds_;
};

}  // namespace

std::vector<SentBucket> buckets_of(const HybridJob& job,
                                   const std::vector<StageRun>& runs,
                                   int rank) {
  BucketMaker maker(job);
  for (std::size_t i = static_cast<std::size_t>(rank); i < runs.size();
       i += static_cast<std::size_t>(job.pp)) {
    const StageRun& run = runs[i];
    for (const ParameterSize& each : run.sizes.embedding) maker.add(each);
    for (std::int64_t block = 0; block < run.sizes.blocks; ++block) {
      for (const ParameterSize& each : run.sizes.of_block(block)) {
        maker.add(each);
      }
    }
    for (const ParameterSize& each : run.sizes.head) maker.add(each);
  }
  return maker.all();
}

namespace {

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

}  // namespace

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

const std::vector<RankUpdate>& rank_updates(const HybridJob& job,
                                            const sim::CostModel& costs,
                                            const std::vector<StageRun>& runs) {
  // Not by what memory and time of a micro-batch depend on: many plans share these
  auto key = std::make_tuple(
      job.cluster.name, job.cluster.device.sustained, job.sizes.key(),
      job.layout.tp, job.layout.cp, job.layout.ep, job.layout.cuts_tokens,
      job.layout.dtype, job.gradient_dtype, job.pp, job.dp, job.chunks,
      job.blocks, job.zero_stage, job.bucket_bytes, job.is_tied);
  static std::map<decltype(key), std::vector<RankUpdate>> known;
  const auto [found, is_new] = known.try_emplace(key);
  std::vector<RankUpdate>& all = found->second;
  if (!is_new) return all;
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
}

}  // namespace shardbook::planner
