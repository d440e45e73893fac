#include "chapters/pictures/lanes.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <vector>

#include "sim/timeline_step.h"

namespace shardbook::pictures {
namespace {

struct Stretch {
  double begin_s = 0, end_s = 0;
};

}  // namespace

double Lanes::queue(const std::string& name, const sim::RankTimeline& timeline,
                    const std::string& queue, double step_s, double height) {
  const double y = figure_.add_row(height + 3);
  figure_.text(0, y + height / 2 + 4, name);
  draw(timeline, queue, step_s, y, height);
  return y;
}

void Lanes::draw(const sim::RankTimeline& timeline, const std::string& queue,
                 double step_s, double y, double height) {
  figure_.box({begin_, y, pixels(step_s), height}, "empty");
  // Neighbours of a class that touch are one
  std::map<std::string, std::vector<Stretch>> stretches;
  for (const sim::TimelineEvent& event : timeline.events) {
    if (event.queue != queue || event.category == "wait") continue;
    std::vector<Stretch>& row = stretches[sim::class_of(event)];
    if (!row.empty() && pixels(event.begin_s - row.back().end_s) < 0.4) {
      row.back().end_s = std::max(row.back().end_s, event.end_s);
    } else {
      row.push_back({event.begin_s, event.end_s});
    }
  }
  for (const auto& [css_class, row] : stretches) {
    const bool is_thin = css_class == "bubble" || css_class == "exposed";
    std::string path;
    for (const Stretch& each : row) {
      path += fmt::format("M{} {}h{}", px(x(each.begin_s)), px(y + height / 2),
                          px(std::max(pixels(each.end_s - each.begin_s), 0.5)));
    }
    figure_.line(path, color_of(css_class), (is_thin ? 0.3 : 1) * height);
  }
}

void Lanes::bar(double from_s, double to_s, double y, double row_height,
                double height, const std::string& css_class) {
  figure_.box({x(from_s), y + (row_height - height) / 2,
               std::max(pixels(to_s - from_s), 0.5), height},
              css_class);
}

void Lanes::axis(const Unit& unit, const std::string& name) {
  figure_.axis(begin_, end_, length_s_, unit, name);
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

double waiting_s(const sim::RankTimeline& timeline) {
  double sum = 0;
  for (const sim::TimelineEvent& event : timeline.events) {
    if (event.queue == "compute" && event.category == "exposed") {
      sum += event.end_s - event.begin_s;
    }
  }
  return sum;
}

}  // namespace shardbook::pictures
