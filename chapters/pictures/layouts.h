#pragma once

// Ranks on a grid, and schedules over time.

#include <functional>
#include <string>
#include <vector>

#include "chapters/common/pipeline/replay.h"
#include "chapters/common/pipeline/schedule.h"
#include "chapters/pictures/figure.h"
#include "comm/topology.h"

namespace shardbook::pictures {

/// Which rank sits where on the grid of named axes.
Picture mesh(const Topology& topology);

/// A schedule of a pipeline, drawn in the time of `replay`.
Picture schedule(const std::string& title, const pipeline::Schedule& schedule,
                 const pipeline::Replay& replay);

struct NamedSchedule {
  std::string name = "";
  pipeline::Schedule schedule = {};
  pipeline::Replay replay = {};
  /// The text below an action's box; none: no room for texts.
  std::function<std::string(int rank, const pipeline::Action& action)> below =
      {};
};
/// One below the other, on one axis.
Picture schedules(const std::string& title,
                  const std::vector<NamedSchedule>& all);

}  // namespace shardbook::pictures
