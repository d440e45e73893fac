#include "chapters/figures/lane.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <vector>

#include "sim/timeline_step.h"

namespace shardbook::figures {
namespace {

struct Block {
  double begin = 0, end = 0;
};

}  // namespace

using pictures::px;

void draw_lane(pictures::Figure& figure, const sim::RankTimeline& timeline,
               const std::string& queue, const pictures::Box& at,
               double pixels) {
  figure.box(at, "empty");
  // Neighbours of a class that touch are one block
  std::map<std::string, std::vector<Block>> blocks;
  for (const sim::TimelineEvent& event : timeline.events) {
    if (event.queue != queue || event.category == "wait") continue;
    std::vector<Block>& row = blocks[sim::class_of(event)];
    if (!row.empty() && pixels * (event.begin_s - row.back().end) < 0.4) {
      row.back().end = std::max(row.back().end, event.end_s);
    } else {
      row.push_back({event.begin_s, event.end_s});
    }
  }
  for (const auto& [css_class, row] : blocks) {
    const bool is_thin = css_class == "bubble" || css_class == "exposed";
    std::string path;
    for (const Block& block : row) {
      path +=
          fmt::format("M{} {}h{}", px(at.x + pixels * block.begin),
                      px(at.y + at.height / 2),
                      px(std::max(pixels * (block.end - block.begin), 0.5)));
    }
    figure.line(path, pictures::color_of(css_class),
                (is_thin ? 0.3 : 1) * at.height);
  }
}

double busy_s(const sim::RankTimeline& timeline, const std::string& queue) {
  double sum = 0;
  for (const sim::TimelineEvent& event : timeline.events) {
    if (event.queue == queue && sim::is_work(event)) {
      sum += event.end_s - event.begin_s;
    }
  }
  return sum;
}

double exposed_s(const sim::RankTimeline& timeline) {
  double sum = 0;
  for (const sim::TimelineEvent& event : timeline.events) {
    if (event.queue == "compute" && event.category == "exposed") {
      sum += event.end_s - event.begin_s;
    }
  }
  return sum;
}

}  // namespace shardbook::figures
