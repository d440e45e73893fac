#pragma once

// The rules that every schedule keeps.
//
//   check(s);  // schedule 'mine': tick 7, rank 2: B3 before its forward F3
//
// `check` replays the lists tick by tick: every action takes one tick (an
// update none) and begins when its rank is free and its inputs are computed.
// `check` reports the earliest violation. The rules:
//
// - every stage runs F and B (or I and W) of every micro-batch once, F first;
// - W runs first in, first out per chunk, so that gradients are summed in the
//   order of the input gradients;
// - F waits for F of the previous stage, B and I for B or I of the next stage;
// - an update follows all the gradients that it claims, and no others (I has
//   those of biases and norms); all updates of a stage claim equally many;
// - a forward reads a version of the weights that exists;
// - blocking receives, and replicas that update together, do not deadlock.

#include "chapters/common/pipeline/schedule.h"

namespace shardbook::pipeline {

/// Throws Error that names the schedule, the tick, the rank and the rule.
void check(const Schedule& schedule);

}  // namespace shardbook::pipeline
