#pragma once

// What makes a schedule a schedule.
//
//   check(s);  // schedule 'mine': tick 7, rank 2: B3 before its forward F3
//
// The lists are played tick by tick: every action takes one tick (an update
// none) and begins when its rank is free and what it reads has been made. The
// earliest violation is the one reported. The rules:
//
// - every stage runs F and B (or I and W) of every micro-batch once, F first;
// - W runs first in, first out per chunk, so that gradients are summed in the
//   order of the input gradients;
// - F waits for F of the stage before, B and I for B or I of the stage behind;
// - an update has all the gradients that it claims, and no others (I has those
//   of biases and norms), and claims as many as every update of its stage;
// - a forward reads a version of the weights that exists;
// - receives that block, and replicas that update together, do not wait for
//   ever.

#include "chapters/common/pipeline/schedule.h"

namespace shardbook::pipeline {

/// Throws Error that names the schedule, the tick, the rank and the rule.
void check(const Schedule& schedule);

}  // namespace shardbook::pipeline
