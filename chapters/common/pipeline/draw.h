#pragma once

// A schedule as the figure of its paper.
//
//   std::cout << draw(s, replay(s, {.forward = 1, .backward = 2}));
//
//   rank 0 |F0 F1 .  .  B0--- B1---
//   rank 1 |.  F0 B0--- F1 B1---

#include <string>

#include "chapters/common/pipeline/replay.h"
#include "chapters/common/pipeline/schedule.h"

namespace shardbook::pipeline {

/// One line per rank, one column per `tick` of virtual time (0: the shortest
/// action). A dot is an idle tick, dashes continue an action of several ticks,
/// "F3.1" is of chunk 1, and a pair that overlaps is "F5&B2". Actions that take
/// no time are not drawn. Throws Error for more than 2000 columns.
std::string draw(const Schedule& schedule, const Replay& replay,
                 double tick = 0);

}  // namespace shardbook::pipeline
