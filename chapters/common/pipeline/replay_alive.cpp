// The memory that a schedule keeps while it runs.

#include <algorithm>

#include "chapters/common/pipeline/dependencies.h"
#include "chapters/common/pipeline/replay.h"
#include "chapters/common/pipeline/schedule.h"
#include "core/check.h"

namespace shardbook::pipeline {
namespace {

/// Calls `seen(live, index, is_end)` with the sets of one rank after each action
/// (or pair) has begun and after it has ended, in the order of the list.
template <typename Seen>
void count_sets(const std::vector<Action>& list, double weight_share,
                const Seen& seen) {
  double live = 0;
  for (std::size_t i = 0; i < list.size(); ++i) {
    const std::size_t last = i + (list[i].overlaps_next ? 1 : 0);
    for (std::size_t j = i; j <= last; ++j) {
      if (list[j].kind == ActionKind::kForward) live += 1;
    }
    seen(live, i, false);
    for (; i <= last; ++i) {
      if (list[i].kind == ActionKind::kBackward) live -= 1;
      if (list[i].kind == ActionKind::kBackwardInput) live -= 1 - weight_share;
      if (list[i].kind == ActionKind::kBackwardWeight) live -= weight_share;
    }
    i = last;
    seen(live, i, true);
  }
}

/// Updates of a chunk before each action of the rank's list.
std::vector<int> updates_before(const Schedule& schedule, int rank, int chunk) {
  std::vector<int> result;
  int count = 0;
  for (const Action& each : schedule.actions[at(rank)]) {
    result.push_back(count);
    if (each.kind == ActionKind::kUpdate && each.chunk == chunk) ++count;
  }
  return result;
}

bool is_gradient(ActionKind kind) {
  return kind == ActionKind::kBackward || kind == ActionKind::kBackwardWeight;
}

bool reads_weights(ActionKind kind) {
  return kind != ActionKind::kUpdate && kind != ActionKind::kBackwardWeight;
}

/// Versions of a chunk that exist while each action runs: from the oldest that
/// this or a later action reads, to the newest.
std::vector<int> versions_kept(const Schedule& schedule,
                               const ReadVersions& reads, int rank, int chunk) {
  const auto& list = schedule.actions[at(rank)];
  const int stage = schedule.stage_at(rank, chunk);
  const auto before = updates_before(schedule, rank, chunk);
  // From the back: the oldest version that the remaining actions read
  std::vector<int> result(list.size(), 1);
  int oldest = before.empty() ? 0 : before.back() + 1;
  for (std::size_t i = list.size(); i-- > 0;) {
    const Action& a = list[i];
    const bool is_here = a.chunk == chunk;
    if (is_here && reads_weights(a.kind)) {
      oldest = std::min(oldest, reads.of(stage, a.micro_batch));
    }
    const bool makes_one = is_here && a.kind == ActionKind::kUpdate;
    const int newest = before[i] + (makes_one ? 1 : 0);
    result[i] = newest - std::min(oldest, newest) + 1;
  }
  return result;
}

}  // namespace

std::vector<double> max_live_shares(const Schedule& schedule,
                                    double weight_share) {
  std::vector<double> result;
  for (const auto& list : schedule.actions) {
    double& most = result.emplace_back(0);
    count_sets(list, weight_share, [&most](double live, std::size_t, bool) {
      most = std::max(most, live);
    });
  }
  return result;
}

std::vector<std::vector<LiveSets>> live_activations(const Schedule& schedule,
                                                    const Replay& replay,
                                                    Until until) {
  std::vector<std::vector<LiveSets>> result;
  for (std::size_t rank = 0; rank < schedule.actions.size(); ++rank) {
    auto& row = result.emplace_back(1);  // none at time 0
    const auto seen = [&](double live, std::size_t index, bool is_end) {
      const Span& span = replay.spans[rank][index];
      const double time = is_end ? span.end : span.begin;
      const int sets = static_cast<int>(live);
      // Changes at the same time are one change, or none if they cancel
      if (row.size() > 1 && row.back().from == time) row.pop_back();
      if (time == 0) row.back().sets = sets;
      if (row.back().sets != sets) row.push_back({time, sets});
    };
    count_sets(schedule.actions[rank], until == Until::kWeight ? 1 : 0, seen);
  }
  return result;
}

std::vector<int> max_live_activations(const Schedule& schedule, Until until) {
  const auto sets = max_live_shares(schedule, until == Until::kWeight ? 1 : 0);
  return {sets.begin(), sets.end()};
}

std::vector<VersionRecord> versions(const Schedule& schedule) {
  const ReadVersions reads(schedule);
  std::vector<VersionRecord> result;
  for (int rank = 0; rank < schedule.num_ranks; ++rank) {
    const auto& list = schedule.actions[at(rank)];
    for (int chunk = 0; chunk < schedule.num_chunks(rank); ++chunk) {
      const int stage = schedule.stage_at(rank, chunk);
      const auto before = updates_before(schedule, rank, chunk);
      for (std::size_t i = 0; i < list.size(); ++i) {
        const Action& a = list[i];
        if (a.chunk != chunk || !is_gradient(a.kind)) continue;
        result.push_back(
            {stage, a.micro_batch, reads.of(stage, a.micro_batch), before[i]});
      }
    }
  }
  std::stable_sort(result.begin(), result.end(),
                   [](const VersionRecord& a, const VersionRecord& b) {
                     return a.stage < b.stage;
                   });
  return result;
}

std::vector<int> max_versions(const Schedule& schedule) {
  const ReadVersions reads(schedule);
  std::vector<int> result;
  for (int rank = 0; rank < schedule.num_ranks; ++rank) {
    int sum = 0;
    for (int chunk = 0; chunk < schedule.num_chunks(rank); ++chunk) {
      const auto kept = versions_kept(schedule, reads, rank, chunk);
      if (kept.empty()) continue;
      sum += *std::max_element(kept.begin(), kept.end());
    }
    result.push_back(sum);
  }
  return result;
}

}  // namespace shardbook::pipeline
