#pragma once

// A schedule in virtual time: its figure, its idle time and its memory.
//
//   Replay r = replay(s, {.forward = 1, .backward = 2});
//   std::cout << draw(s, r);                // rank 0 |F0 F1 .  .  B0--- B1---
//   idle_share(r);                          // 1F1B: (p-1)/(m+p-1)
//   max_live_activations(s, Until::kInput);   // 1F1B: min(p-s, m)
//
// Every action begins when its rank is free and its inputs have arrived, as on
// ranks with blocking receives and non-blocking sends.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "chapters/common/pipeline/schedule.h"

namespace shardbook::pipeline {

/// Durations of one stage's actions, in any unit.
struct Costs {
  double forward = 1;
  double backward = 2;
  double backward_input = 1;
  double backward_weight = 1;
  /// Both actions of a pair that overlaps; below 0: their sum. For a pair of
  /// two stages, the larger value counts.
  double overlapped_pair = -1;
  double update = 0;
  /// From the end of the sender's action to the begin of the action that reads
  /// its message. 0 between chunks of one rank.
  double communication = 0;
};

struct Span {
  double begin = 0;
  double end = 0;
};

struct Replay {
  /// By rank and action. Both actions of a pair have the pair's span.
  std::vector<std::vector<Span>> spans;
  double makespan = 0;
  // By rank
  std::vector<double> busy;    ///< sum of durations
  std::vector<double> window;  ///< from the first begin to the last end
  /// When its list has ended and the messages that it sent have arrived, where
  /// ReplayOptions has messages.
  std::vector<double> flushed;
};

/// All stages have the same costs. Throws Error for schedules that `check`
/// rejects.
Replay replay(const Schedule& schedule, const Costs& costs = Costs());

/// The costs of a stage for one micro-batch.
using CostsOf = std::function<Costs(int stage, int micro_batch)>;
/// The receiving stage, which may be on the sender's rank.
struct Message {
  int stage = 0;
  double seconds = 0;
};
struct ReplayOptions {
  /// Whether the forward runs again before this backward; null: never.
  std::function<bool(int rank, const Action& backward)> recomputes = {};
  /// Whether it runs again before the gradient arrives.
  bool early_recompute = true;
  /// The messages of a stage after its forward (or backward). Those between two
  /// ranks follow each other. Null: Costs::communication, all at the same time.
  std::function<std::vector<Message>(int stage, int micro_batch,
                                     bool is_forward)>
      messages = {};
  /// By rank: when its list begins; none: at 0.
  std::vector<double> begins = {};
};
Replay replay(const Schedule& schedule, const CostsOf& costs,
              const ReplayOptions& options = {});

/// The figure of a paper: one line per rank, one column per `tick` of virtual
/// time (0: the shortest action). A dot is an idle tick, dashes continue an
/// action of several ticks, "F3.1" is of chunk 1, and a pair that overlaps is
/// "F5&B2". Actions that take no time are not drawn. Throws Error for more than
/// 2000 columns.
std::string draw(const Schedule& schedule, const Replay& replay,
                 double tick = 0);

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

// Memory

/// The end of the life of a set of activations, which begins with F.
enum class Until {
  kInput,  ///< the end of B or I
  /// The end of B or W: W reads what the forward kept. ZB-H1 has p sets on
  /// every stage by this count.
  kWeight
};
/// The largest number of sets that a rank keeps at once, by rank. In an
/// interleaved schedule a set belongs to one chunk. In a pair, the forward's
/// set begins before the backward's ends.
std::vector<int> max_live_activations(const Schedule& schedule, Until until);
/// The same where `weight_share` of each set lives until kWeight, and the rest
/// until kInput.
std::vector<double> max_live_shares(const Schedule& schedule,
                                    double weight_share);

/// The sets that a rank keeps from this time on.
struct LiveSets {
  double from = 0;
  int sets = 0;
};
/// By rank, in the order of time, from 0 on. Where one set ends at the time at
/// which another begins, only their difference is seen. Schedules whose
/// `repeats` is 0.
std::vector<std::vector<LiveSets>> live_activations(const Schedule& schedule,
                                                    const Replay& replay,
                                                    Until until);

// Versions of weights: version n has had n updates.

struct VersionRecord {
  int stage = 0;
  int micro_batch = 0;
  int read = 0;        ///< by the forward and, stashed, by the backward
  int applied_to = 0;  ///< the newest version when the backward is done
};
/// By stage, then in the order of backwards. All 0 in a schedule that flushes.
std::vector<VersionRecord> versions(const Schedule& schedule);
/// The most versions that a rank has to keep, including the newest; summed over
/// its chunks.
std::vector<int> max_versions(const Schedule& schedule);

}  // namespace shardbook::pipeline
