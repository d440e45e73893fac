#pragma once

// Runs that figures draw: on shapes, in virtual time.

#include <cstdint>
#include <string>

#include "chapters/programs/sweep.h"
#include "sim/timeline_step.h"

namespace shardbook::figures {

constexpr int kSteps = 3;

/// The end of a line: kSteps on shapes.
///
///   run("02_ddp" + on_shapes("textbook", 8, "gpt2", 16, 1024)).time.step_s
std::string on_shapes(const std::string& cluster, int world_size,
                      const std::string& model, std::int64_t batch,
                      std::int64_t seq);
/// The same as options, for what a report does not say.
Options options_on_shapes(const std::string& cluster, int world_size,
                          const std::string& model, std::int64_t batch,
                          std::int64_t seq);

/// The last step of the first rank. Times count from its begin.
sim::RankTimeline first_rank(const Report& report);

}  // namespace shardbook::figures
