#pragma once

// A schedule in virtual time, and what it idles and keeps.
//
//   Replay r = replay(s, {.forward = 1, .backward = 2});
//   idle_share(r);                          // 1F1B: (p-1)/(m+p-1)
//   max_live_activations(s, r, Until::kInput);   // 1F1B: min(p-s, m)
//
// Every action begins when its rank is free and what it reads has arrived: so
// do ranks that receive with blocking calls and send without.

#include <cstdint>
#include <vector>

#include "chapters/common/pipeline/schedule.h"

namespace shardbook::pipeline {

/// Durations of one stage's actions, in any unit.
struct Costs {
  double forward = 1;
  double backward = 2;
  double backward_input = 1;
  double backward_weight = 1;
  /// Both of a pair that overlaps; below 0: their sum. The larger one counts
  /// when they are of stages that differ.
  double overlapped_pair = -1;
  double update = 0;
  /// From the end of an action to the begin of one that reads its message;
  /// the sender's. None between chunks of one rank.
  double communication = 0;
};

struct Span {
  double begin = 0;
  double end = 0;
};

struct Replay {
  /// By rank and action of its list. Both of a pair have the pair's span.
  std::vector<std::vector<Span>> spans;
  double makespan = 0;
  // By rank
  std::vector<double> busy;    ///< sum of durations
  std::vector<double> window;  ///< from the first begin to the last end
};

/// One stage's costs for all. Checks the schedule; throws what `check` throws.
Replay replay(const Schedule& schedule, const Costs& costs = Costs());
/// Costs by stage. Throws Error when there are more or fewer.
Replay replay(const Schedule& schedule, const std::vector<Costs>& costs);
/// Of spans that are known already, by rank and action: sums them up.
Replay replay_of(const Schedule& schedule,
                 std::vector<std::vector<Span>> spans);

// Three measures of the same idleness; papers quote all of them.

/// Idle time of all ranks over makespan times ranks. GPipe, 1F1B with equal
/// stages: (p-1)/(m+p-1).
double idle_share(const Replay& replay);
/// Idle time over work on the rank where it is largest. GPipe, 1F1B: (p-1)/m;
/// interleaved: (p-1)/(v m). Narayanan et al. 2021, section 2.2.
double bubble_over_work(const Replay& replay);
/// (window - work)/window on the rank where it is largest: a rank's time counts
/// from its own first action to its own last. Qi et al. 2023, section 4.3: this
/// is the definition that gives their table 5.
double window_bubble(const Replay& replay);

// What is alive

/// What ends the life of a set of activations, which begins with F.
enum class Until {
  kInput,  ///< the end of B or I
  /// The end of B or W: W reads what the forward kept. ZB-H1 has p sets on
  /// every stage by this count.
  kWeight
};
struct Level {
  double time = 0;
  double value = 0;
};
/// Sets of activations of a rank over time; a level holds until the next.
std::vector<Level> live_activations(const Schedule& schedule,
                                    const Replay& replay, int rank,
                                    Until until);
/// The largest number, by rank. A set of an interleaved schedule is that of one
/// chunk. In a pair, the forward's begins before the backward's ends.
std::vector<int> max_live_activations(const Schedule& schedule,
                                      const Replay& replay, Until until);

/// Bytes that one micro-batch occupies at one stage.
struct StageBytes {
  double until_input = 0;   ///< from F to the end of B or I
  double until_weight = 0;  ///< from F to the end of B or W
  double after_input = 0;   ///< from I to W: what waits besides
  double during_forward = 0, during_backward = 0;  ///< of B, I and W
  double version = 0;  ///< weights, of versions beside the newest
};
/// Largest sum by rank; `bytes` by stage. Recomputation (GPipe): the stage's
/// input in `until_input`, its activations in `during_backward`.
std::vector<double> peak_bytes(const Schedule& schedule, const Replay& replay,
                               const std::vector<StageBytes>& bytes);

// Versions of weights: version n has had n updates.

struct VersionRecord {
  int stage = 0;
  int micro_batch = 0;
  int read = 0;        ///< by the forward and, stashed, by the backward
  int applied_to = 0;  ///< the newest when the backward is done
};
/// By stage, then in the order of backwards. A schedule that flushes: all 0.
std::vector<VersionRecord> versions(const Schedule& schedule);
/// The most versions that a rank has to keep, the newest among them; the sum
/// over its chunks.
std::vector<int> max_versions(const Schedule& schedule);

}  // namespace shardbook::pipeline
