#pragma once

// The part of a schedule that repeats.
//
//   1F1B, rank 1 of 4:   F0 F1 | F2 B0 | F3 B1 | F4 B2 | ... B4 B5
//                warm-up         repetitions 0, 1, 2, ...    cool-down
//
// On shapes, repetitions that take the same time need not all run
// (sim/steady_state.h).

#include <vector>

#include "chapters/common/pipeline/schedule.h"

namespace shardbook::pipeline {

/// Repetition i of a rank is actions [first.begin + i * n, first.end + i * n)
/// of its list, with n the length of `first`: repetition 0, shifted by i *
/// period micro-batches.
struct Steady {
  std::vector<Schedule::Part> first;  ///< by rank
  int period = 0;
  /// Repetitions that all ranks have; 0: the schedule does not repeat.
  int count = 0;
};

/// Repetitions in which no action waits for a later repetition of any rank: all
/// ranks may meet between two of them. For schedules that flush and have one
/// route.
Steady steady_state(const Schedule& schedule);

}  // namespace shardbook::pipeline
