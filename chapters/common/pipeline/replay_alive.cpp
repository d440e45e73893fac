// The memory that a schedule keeps while it runs.

#include <algorithm>

#include "chapters/common/pipeline/dependencies.h"
#include "chapters/common/pipeline/replay.h"
#include "chapters/common/pipeline/schedule.h"
#include "core/check.h"

namespace shardbook::pipeline {
namespace {

/// The bytes that an action adds when it begins and when it ends.
struct Change {
  double at_begin = 0;
  double at_end = 0;
};

Change change(const StageBytes& bytes, ActionKind kind) {
  const double work = bytes.during_backward;
  switch (kind) {
    case ActionKind::kForward:
      return {bytes.until_input + bytes.until_weight + bytes.during_forward,
              -bytes.during_forward};
    case ActionKind::kBackward:
      return {work, -work - bytes.until_input - bytes.until_weight};
    case ActionKind::kBackwardInput:
      return {work, -work - bytes.until_input + bytes.after_input};
    case ActionKind::kBackwardWeight:
      return {work, -work - bytes.after_input - bytes.until_weight};
    case ActionKind::kUpdate:
      break;
  }
  return {};
}

/// Levels of one rank. A rank does one action after another, so its list is in
/// the order of time; both actions of a pair begin before either ends.
/// `besides`: further bytes that exist during each action.
std::vector<Level> levels(const Schedule& schedule, const Replay& replay,
                          int rank, const std::vector<StageBytes>& bytes,
                          const std::vector<double>& besides) {
  std::vector<Level> result = {{0, 0}};
  double was_besides = 0;
  const auto add = [&](double time, double delta) {
    if (delta != 0) result.push_back({time, result.back().value + delta});
  };
  const auto& list = schedule.actions[at(rank)];
  const auto& spans = replay.spans[at(rank)];
  std::vector<StageBytes> by_chunk;
  for (const int stage : schedule.stages(rank)) {
    by_chunk.push_back(stage < 0 ? StageBytes() : bytes[at(stage)]);
  }
  const auto of = [&](std::size_t i) {
    return change(by_chunk[at(list[i].chunk)], list[i].kind);
  };
  for (std::size_t i = 0; i < list.size(); ++i) {
    const std::size_t last = i + (list[i].overlaps_next ? 1 : 0);
    add(spans[i].begin, besides[i] - was_besides);
    was_besides = besides[i];
    for (std::size_t j = i; j <= last; ++j) add(spans[j].begin, of(j).at_begin);
    for (std::size_t j = i; j <= last; ++j) add(spans[j].end, of(j).at_end);
    i = last;
  }
  return result;
}

double highest(const std::vector<Level>& levels) {
  double result = 0;
  for (const Level& each : levels) result = std::max(result, each.value);
  return result;
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

std::vector<Level> live_activations(const Schedule& schedule,
                                    const Replay& replay, int rank,
                                    Until until) {
  StageBytes one;
  (until == Until::kInput ? one.until_input : one.until_weight) = 1;
  return levels(schedule, replay, rank,
                std::vector<StageBytes>(at(schedule.num_stages), one),
                std::vector<double>(schedule.actions[at(rank)].size(), 0));
}

std::vector<int> max_live_activations(const Schedule& schedule,
                                      const Replay& replay, Until until) {
  std::vector<int> result;
  for (int rank = 0; rank < schedule.num_ranks; ++rank) {
    result.push_back(static_cast<int>(
        highest(live_activations(schedule, replay, rank, until))));
  }
  return result;
}

std::vector<double> peak_bytes(const Schedule& schedule, const Replay& replay,
                               const std::vector<StageBytes>& bytes) {
  SB_CHECK(bytes.size() == at(schedule.num_stages), "schedule '", schedule.name,
           "': bytes of ", bytes.size(), " stages; give ", schedule.num_stages);
  const ReadVersions reads(schedule);
  std::vector<double> result;
  for (int rank = 0; rank < schedule.num_ranks; ++rank) {
    // Beside the newest version
    std::vector<double> weights(schedule.actions[at(rank)].size(), 0);
    for (int chunk = 0; chunk < schedule.num_chunks(rank); ++chunk) {
      const auto kept = versions_kept(schedule, reads, rank, chunk);
      const double each = bytes[at(schedule.stage_at(rank, chunk))].version;
      for (std::size_t i = 0; i < kept.size(); ++i) {
        weights[i] += each * (kept[i] - 1);
      }
    }
    result.push_back(highest(levels(schedule, replay, rank, bytes, weights)));
  }
  return result;
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
