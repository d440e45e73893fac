// The pictures of display.h.

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <set>

#include "chapters/common/pictures/bytes.h"
#include "chapters/common/pictures/figure.h"
#include "chapters/common/pictures/svg.h"
#include "chapters/common/pictures/text_table.h"
#include "chapters/common/pictures/timeline_picture.h"
#include "chapters/common/pipeline/draw.h"
#include "notebooks/display.h"
#include "sim/timeline_text.h"

namespace shardbook::notebook {
namespace {

// Curves and meshes: neighbours are easy to tell apart.
constexpr std::array<const char*, 8> kColors = {"#2f6fb5", "#c2570c", "#2e7d4f",
                                                "#8a4bb0", "#9a7108", "#a93558",
                                                "#11767c", "#6a737c"};
const char* color(std::size_t i) { return kColors[i % kColors.size()]; }

std::string format_value(double value) { return fmt::format("{:.3g}", value); }

// The class of report.css that has an action's colour.
const char* class_of_action(pipeline::ActionKind kind) {
  switch (kind) {
    case pipeline::ActionKind::kForward:
      return "forward";
    case pipeline::ActionKind::kBackward:
    case pipeline::ActionKind::kBackwardInput:
      return "backward";
    case pipeline::ActionKind::kBackwardWeight:
      return "weights";
    case pipeline::ActionKind::kUpdate:
      return "optimizer";
  }
  return "other";
}

// "pp=1 dp=0", without the axis that runs along the line.
std::string line_name(const Topology& topology, const Coord& coord) {
  std::string name;
  for (std::size_t i = 0; i + 1 < topology.axes().size(); ++i) {
    const std::string& axis = topology.axes()[i];
    name +=
        fmt::format("{}{}={}", name.empty() ? "" : " ", axis, coord.at(axis));
  }
  return name;
}

}  // namespace

Picture timeline(const std::vector<sim::RankTimeline>& timelines,
                 int max_groups) {
  if (timelines.empty()) return {"no virtual time was kept", "", ""};
  sim::TextStyle style;
  style.max_groups = max_groups;
  return {sim::timeline_text(timelines, style),
          timeline_svg(sim::last_step(timelines), max_groups), ""};
}

Picture memory(const std::vector<sim::RankTimeline>& timelines,
               int max_groups) {
  if (timelines.empty()) return {"no virtual time was kept", "", ""};
  // The scratch memory of kernels depends on the machine.
  std::vector<sim::RankTimeline> without_workspace = timelines;
  for (sim::RankTimeline& timeline : without_workspace) {
    for (sim::MemorySample& sample : timeline.memory) {
      sample.bytes[static_cast<std::size_t>(MemoryKind::kWorkspace)] = 0;
    }
  }
  const sim::StepView view = sim::last_step(without_workspace);
  Picture picture;
  for (const sim::RankGroup& group : view.groups) {
    std::array<std::int64_t, kNumMemoryKinds> most{};
    for (const sim::MemorySample& sample : group.timeline.memory) {
      for (std::size_t k = 0; k < most.size(); ++k) {
        most[k] = std::max(most[k], sample.bytes[k]);
      }
    }
    picture.text += fmt::format("{}, at most {}:", sim::rank_list(group.ranks),
                                format_bytes(memory_peak(group)));
    for (std::size_t k = 0; k < most.size(); ++k) {
      if (most[k] == 0) continue;
      picture.text +=
          fmt::format(" {} {}", memory_kind_name(static_cast<MemoryKind>(k)),
                      format_bytes(static_cast<double>(most[k])));
    }
    picture.text += "\n";
  }
  picture.svg = memory_svg(view, max_groups);
  return picture;
}

Picture mesh(const Topology& topology) {
  constexpr double kCell = 44, kHeight = 24, kName = 150;
  const int columns = topology.sizes().back();
  std::vector<std::vector<std::string>> rows = {{""}};
  const std::string& last = topology.axes().back();
  for (int c = 0; c < columns; ++c) {
    rows[0].push_back(fmt::format("{}={}", last, c));
  }
  Coord coord;
  for (const std::string& axis : topology.axes()) coord[axis] = 0;
  const int num_lines = topology.world_size() / columns;
  for (int line = 0; line < num_lines; ++line) {
    // The last axis but one varies fastest from line to line.
    int rest = line;
    for (std::size_t a = topology.axes().size() - 1; a-- > 0;) {
      coord[topology.axes()[a]] = rest % topology.sizes()[a];
      rest /= topology.sizes()[a];
    }
    rows.push_back({line_name(topology, coord)});
    for (int c = 0; c < columns; ++c) {
      coord[last] = c;
      rows.back().push_back(std::to_string(topology.get_rank(coord)));
    }
  }
  Figure figure(kName + kCell * columns);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const double y = figure.add_row(kHeight);
    figure.text(0, y + 16, rows[i][0]);
    for (std::size_t j = 1; j < rows[i].size(); ++j) {
      const double x = kName + kCell * static_cast<double>(j - 1);
      if (i > 0) {
        figure.colored_box({x, y, kCell - 2, kHeight - 2}, "#d5e3f2",
                           "#2f6fb5");
      }
      figure.text(x + kCell / 2 - 1, y + 16, rows[i][j],
                  Figure::Anchor::kMiddle);
    }
  }
  const std::string title = topology.text() + ": ranks by coordinate";
  return {title + "\n" + text_table::align(rows), figure.svg(title), ""};
}

Picture holders(const std::vector<dtensor::Held>& all) {
  return {dtensor::picture_text(all), dtensor::picture_svg(all), ""};
}

namespace {

/// Of a micro-batch, with a prime for each further chunk: 3 of chunk 0, 3' of
/// chunk 1.
std::string number_of(const pipeline::Action& action) {
  return std::to_string(action.micro_batch) +
         std::string(static_cast<std::size_t>(action.chunk), '\'');
}

/// The pixels of a box with room for this number.
double room_of(const std::string& number) {
  return 6 + 7 * static_cast<double>(number.size());
}

/// So long that all numbers have room, within limits.
double length_of(const pipeline::Schedule& schedule,
                 const pipeline::Replay& replay) {
  double unit = 0;
  for (std::size_t rank = 0; rank < schedule.actions.size(); ++rank) {
    for (std::size_t i = 0; i < schedule.actions[rank].size(); ++i) {
      const pipeline::Span& span = replay.spans[rank][i];
      if (span.end <= span.begin) continue;
      unit = std::max(unit, room_of(number_of(schedule.actions[rank][i])) /
                                (span.end - span.begin));
    }
  }
  return std::clamp(unit * replay.makespan, 700.0, 4000.0);
}

}  // namespace

Picture schedule(const pipeline::Schedule& schedule,
                 const pipeline::Replay& replay) {
  constexpr double kBegin = 60, kRow = 24;
  Figure figure(kBegin + length_of(schedule, replay));
  std::set<std::string> kinds;
  const double unit = (figure.width() - kBegin) / replay.makespan;
  for (std::size_t rank = 0; rank < schedule.actions.size(); ++rank) {
    const double y = figure.add_row(kRow + 3);
    figure.text(0, y + 16, fmt::format("rank {}", rank));
    figure.box({kBegin, y, figure.width() - kBegin, kRow}, "empty");
    bool is_second = false;  // of a pair that shares its time: one above one
    for (std::size_t i = 0; i < schedule.actions[rank].size(); ++i) {
      const pipeline::Action& action = schedule.actions[rank][i];
      const pipeline::Span& span = replay.spans[rank][i];
      const double x = kBegin + unit * span.begin;
      const double width = std::max(unit * (span.end - span.begin) - 1, 0.6);
      const bool is_pair = action.overlaps_next || is_second;
      const Box box{x, y + (is_second ? kRow / 2 : 0), width,
                    is_pair ? kRow / 2 : kRow};
      is_second = action.overlaps_next;
      figure.box(box, class_of_action(action.kind));
      kinds.insert(class_of_action(action.kind));
      const std::string number = number_of(action);
      if (width + 1.01 > room_of(number)) {
        figure.text(x + width / 2, box.y + box.height / 2 + 4, number,
                    Figure::Anchor::kMiddle, 11, "#ffffff");
      }
    }
  }
  std::vector<std::pair<std::string, std::string>> legend;
  for (const auto& [kind, title] :
       {std::pair("forward", "forward"), std::pair("backward", "backward"),
        std::pair("weights", "gradients of weights"),
        std::pair("optimizer", "update")}) {
    if (kinds.count(kind) > 0) legend.emplace_back(kind, title);
  }
  figure.legend(legend);
  return {pipeline::draw(schedule, replay),
          figure.svg("schedule " + schedule.name), ""};
}

Picture curves(const std::vector<Series>& series) {
  constexpr double kHeight = 220, kBegin = 60;
  double low = 0, high = 0;
  std::size_t most = 2;
  bool is_first = true;
  Picture picture;
  std::vector<std::vector<std::string>> rows = {{"", "first", "last"}};
  for (const Series& one : series) {
    if (one.values.empty()) continue;
    const auto [least, largest] =
        std::minmax_element(one.values.begin(), one.values.end());
    low = is_first ? *least : std::min(low, *least);
    high = is_first ? *largest : std::max(high, *largest);
    is_first = false;
    most = std::max(most, one.values.size());
    rows.push_back(
        {one.name, fixed(one.values.front(), 4), fixed(one.values.back(), 4)});
  }
  picture.text = text_table::align(rows);
  if (!(high > low)) high = low + 1;
  Figure figure;
  const double width = figure.width() - kBegin;
  const double y = figure.add_row(kHeight + 6) + 4;
  figure.box({kBegin, y, width, kHeight}, "empty");
  figure.text(kBegin - 6, y + 10, format_value(high), Figure::Anchor::kEnd);
  figure.text(kBegin - 6, y + kHeight, format_value(low), Figure::Anchor::kEnd);
  for (std::size_t s = 0; s < series.size(); ++s) {
    std::vector<svg::Point> points;
    for (std::size_t i = 0; i < series[s].values.size(); ++i) {
      points.push_back(
          {static_cast<double>(i) / static_cast<double>(most - 1),
           0.02 + 0.96 * (series[s].values[i] - low) / (high - low), 0});
    }
    figure.curve(points, color(s), {kBegin, y, width, kHeight});
  }
  figure.axis(kBegin, figure.width(), static_cast<double>(most - 1),
              [](double step) { return fmt::format("{:g}", step); });
  double x = kBegin;
  const double names = figure.add_row(20);
  for (std::size_t s = 0; s < series.size(); ++s) {
    figure.colored_box({x, names + 6, 10, 10}, color(s));
    figure.text(x + 15, names + 15, series[s].name);
    x += 40 + 6.6 * static_cast<double>(series[s].name.size());
  }
  picture.svg = figure.svg("curves over steps");
  return picture;
}

Picture bars(const std::vector<Bar>& all) {
  constexpr double kName = 170, kValue = 130, kRow = 20;
  double most = 0;
  for (const Bar& bar : all) most = std::max(most, bar.value + bar.deviation);
  Figure figure;
  std::vector<std::vector<std::string>> rows;
  for (const Bar& bar : all) {
    const double y = figure.add_row(kRow + 4);
    figure.text(0, y + 14, bar.name);
    const double share = most > 0 ? bar.value / most : 0;
    const Box at{kName, y, figure.width() - kName - kValue, kRow};
    figure.box(at, "empty");
    figure.place(bar.deviation > 0
                     ? svg::bar_with_error(share, bar.deviation / most, "time")
                     : svg::bar(share, "time"),
                 at);
    figure.text(figure.width(), y + 14, bar.text, Figure::Anchor::kEnd);
    rows.push_back({bar.name, bar.text});
  }
  return {text_table::align(rows), figure.svg("bars"), ""};
}

Picture curve(const std::vector<Bar>& points, const Bar& solid,
              const Bar& dashed) {
  constexpr double kBegin = 60, kHeight = 200;
  double most = std::max(solid.value, dashed.value);
  for (const Bar& point : points) {
    most = std::max(most, point.value + point.deviation);
  }
  if (!(most > 0)) most = 1;
  const double top = 1.05 * most;
  Figure figure;
  const Box at{kBegin, figure.add_row(kHeight), figure.width() - kBegin,
               kHeight};
  figure.box(at, "empty");
  std::vector<svg::Point> places;
  std::vector<std::vector<std::string>> rows = {{solid.name, solid.text},
                                                {dashed.name, dashed.text}};
  const double names = figure.add_row(20) + 15;
  for (std::size_t i = 0; i < points.size(); ++i) {
    const double x =
        (static_cast<double>(i) + 0.5) / static_cast<double>(points.size());
    places.push_back({x, points[i].value / top, points[i].deviation / top});
    figure.text(at.x + at.width * x, names, points[i].name,
                Figure::Anchor::kMiddle);
    rows.push_back({points[i].name, points[i].text});
  }
  figure.place(svg::curve(places, solid.value / top, dashed.value / top, ""),
               at);
  figure.text(kBegin - 6, at.y + 10, format_value(top), Figure::Anchor::kEnd);
  figure.text(kBegin - 6, at.y + kHeight, "0", Figure::Anchor::kEnd);
  const double lines = figure.add_row(20);
  figure.colored_box({kBegin, lines + 6, 10, 10}, "#c2570c");
  figure.text(kBegin + 15, lines + 15, solid.name);
  const double next =
      kBegin + 40 + 6.6 * static_cast<double>(solid.name.size());
  figure.colored_box({next, lines + 6, 10, 10}, "#2e7d4f");
  figure.text(next + 15, lines + 15, dashed.name);
  return {text_table::align(rows), figure.svg("a curve with deviations"), ""};
}

}  // namespace shardbook::notebook
