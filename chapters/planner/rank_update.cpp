#include "chapters/planner/rank_update.h"

#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <utility>

#include "chapters/planner/step_parts.h"
#include "core/context.h"

namespace shardbook::planner {
namespace {

/// Fills buckets of one kind after the other, as ddp::assign_buckets does.
class BucketMaker {
 public:
  explicit BucketMaker(const HybridJob& job) : job_(job) {}

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
    const std::array<bool, 4> is = {each.is_expert, each.is_whole,
                                    each.is_partial, is_tied};
    for (Kind& kind : kinds_) {
      if (kind.is == is) return kind;
    }
    kinds_.push_back(
        {is, {0, {}, each.is_expert, each.is_partial, is_tied}, {}});
    return kinds_.back();
  }

  const HybridJob& job_;
  std::vector<Kind> kinds_;
};

double kernel_seconds(const sim::CostModel& costs, const char* name,
                      double bytes) {
  OpEvent event{};
  event.name = name;
  event.bytes = bytes;
  event.phase = Phase::kOptimizer;
  return costs.operation(event).seconds;
}

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
      for (const ParameterSize& each : run.sizes.block) maker.add(each);
    }
    for (const ParameterSize& each : run.sizes.head) maker.add(each);
  }
  return maker.all();
}

RankUpdate rank_update(const HybridJob& job, const sim::CostModel& costs,
                       const std::vector<SentBucket>& buckets) {
  const Ranks groups(job);
  const std::vector<int> replicas = groups.of_replicas(), tp = groups.of_tp(),
                         experts = groups.of_experts(),
                         ends = {0, groups.at_stage(job.pp - 1)};
  const bool is_sharded = job.zero_stage == 1;
  const double element = job.element(), gradient = job.gradient();
  // Equal buckets take equally long
  std::map<std::pair<int, double>, double> known;
  const auto message = [&](int kind, CommOp op, double bytes,
                           const std::vector<int>& ranks) {
    if (ranks.size() == 1) return 0.0;
    const auto [found, is_new] = known.try_emplace({kind, bytes});
    if (is_new) found->second = costs.collective(op, bytes, ranks).seconds;
    return found->second;
  };
  // Zeros, a copy to the message
  const auto pack = [&](double bytes) {
    return kernel_seconds(costs, "fill", bytes) +
           kernel_seconds(costs, "copy", 2 * bytes);
  };
  // and back
  const auto sum = [&](int kind, double bytes, const std::vector<int>& ranks) {
    if (ranks.size() == 1) return 0.0;
    return pack(bytes) + message(kind, CommOp::kAllReduce, bytes, ranks) +
           kernel_seconds(costs, "copy", 2 * bytes);
  };
  RankUpdate times;
  double updates = 0;
  for (const SentBucket& bucket : buckets) {
    const std::vector<int>& same = bucket.is_expert ? experts : replicas;
    const int kind = bucket.is_expert ? 1 : 0;
    const double bytes = bucket.elements * gradient;
    const double own = is_sharded
                           ? bucket.elements / static_cast<double>(same.size())
                           : bucket.elements;
    if (is_sharded) {
      times.sums +=
          pack(bytes) + message(kind, CommOp::kReduceScatter, bytes, same);
      times.gathers += message(kind + 2, CommOp::kAllGather,
                               bucket.elements * element, same);
    } else {
      times.sums += sum(kind, bytes, same);
    }
    if (bucket.is_partial) times.sums += sum(4, own * gradient, tp);
    if (bucket.is_tied) times.tied += sum(5, own * gradient, ends);
    const auto update = [&](double elements) {
      times.squares +=
          kernel_seconds(costs, "sum_of_squares", elements * gradient);
      times.update += kernel_seconds(costs, "adamw",
                                     elements * (2 * element + gradient + 16));
      updates += 1;
    };
    if (is_sharded) {
      update(own);
    } else {
      for (const double each : bucket.parameters) update(each);
    }
  }
  // The host has waited for the norm
  times.update =
      std::max(times.update, updates * costs.cluster().device.launch_s);
  std::vector<int> world(static_cast<std::size_t>(job.ranks()));
  std::iota(world.begin(), world.end(), 0);
  times.squares += message(6, CommOp::kAllReduce, 16, world);
  return times;
}

}  // namespace shardbook::planner
