#include "chapters/pictures/lanes.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <vector>

#include "sim/timeline_step.h"

namespace shardbook::pictures {
namespace {

// Neighbours of one class too close to be told apart.
struct Stretch {
  double begin_s = 0, end_s = 0;
  std::string label;  // of a micro-batch; empty for others
};

// The forward or the backward of one micro-batch, pauses included.
struct Numbered {
  double begin_s = 0, end_s = 0;
  double filled_s = 0;  // without the pauses
  std::string label, css_class, number;
};

std::string number_of(const sim::TimelineEvent& event) {
  return sim::is_work(event) ? sim::micro_batch_of(event) : "";
}

bool is_drawn(const sim::TimelineEvent& event, const std::string& queue) {
  return event.queue == queue && event.category != "wait";
}

}  // namespace

double Lanes::queue(const std::string& name, const sim::RankTimeline& timeline,
                    const std::string& queue, double step_s, double height) {
  const double y = figure_.add_row(height + 3);
  figure_.text(0, y + height / 2 + 4, name);
  draw(timeline, queue, step_s, y, height);
  return y;
}

void Lanes::draw(const sim::RankTimeline& timeline, const std::string& queue,
                 double step_s, double y, double height, bool has_numbers) {
  figure_.box({begin_, y, pixels(step_s), height}, "empty");
  std::map<std::string, std::vector<Stretch>> stretches;
  for (const sim::TimelineEvent& event : timeline.events) {
    if (!is_drawn(event, queue)) continue;
    const bool is_numbered = has_numbers && !number_of(event).empty();
    const std::string label = is_numbered ? event.label : "";
    std::vector<Stretch>& row = stretches[sim::class_of(event)];
    if (!row.empty() && row.back().label == label &&
        pixels(event.begin_s - row.back().end_s) < 0.4) {
      row.back().end_s = std::max(row.back().end_s, event.end_s);
    } else {
      row.push_back({event.begin_s, event.end_s, label});
    }
  }
  for (const auto& [css_class, row] : stretches) {
    const bool is_thin = css_class == "bubble" || css_class == "exposed";
    std::string path;
    for (const Stretch& each : row) {
      const double width = pixels(each.end_s - each.begin_s);
      const double seam = !each.label.empty() && width > 3 ? 0.7 : 0;
      path += fmt::format("M{} {}h{}", px(x(each.begin_s)), px(y + height / 2),
                          px(std::max(width - seam, 0.5)));
    }
    figure_.line(path, css_class, (is_thin ? 0.3 : 1) * height);
  }
  if (has_numbers) draw_numbers(timeline, queue, y, height);
}

void Lanes::draw_numbers(const sim::RankTimeline& timeline,
                         const std::string& queue, double y, double height) {
  std::vector<Numbered> all;
  for (const sim::TimelineEvent& event : timeline.events) {
    const std::string number = number_of(event);
    if (!is_drawn(event, queue) || number.empty()) continue;
    const std::string css_class = sim::class_of(event);
    if (all.empty() || all.back().label != event.label ||
        all.back().css_class != css_class) {
      all.push_back({event.begin_s, 0, 0, event.label, css_class, number});
    }
    all.back().end_s = std::max(all.back().end_s, event.end_s);
    all.back().filled_s += event.end_s - event.begin_s;
  }
  for (const Numbered& each : all) {
    const double length_s = each.end_s - each.begin_s;
    const double width = text_width(each.number) + 3;
    if (pixels(length_s) < width) continue;
    const double middle = x((each.begin_s + each.end_s) / 2);
    if (each.filled_s < 0.9 * length_s) {
      figure_.box({middle - width / 2, y + 3, width, height - 6},
                  each.css_class);
    }
    figure_.middle(middle, y + height / 2 + 4.5, each.number, kWhite);
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

}  // namespace shardbook::pictures
