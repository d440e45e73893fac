#pragma once

#include <string>

#include "chapters/pictures/figure.h"
#include "sim/timeline.h"

namespace shardbook::figures {

/// What a queue does over time, in a lane whose left edge is time 0, at
/// `pixels` per second. Waiting is thin.
void draw_lane(pictures::Figure& figure, const sim::RankTimeline& timeline,
               const std::string& queue, const pictures::Box& at,
               double pixels);

/// The seconds in which a queue works, and in which it waits for a message.
double busy_s(const sim::RankTimeline& timeline, const std::string& queue);
double exposed_s(const sim::RankTimeline& timeline);

}  // namespace shardbook::figures
