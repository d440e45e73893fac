#include "chapters/pictures/layouts.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "chapters/pictures/figure.h"
#include "chapters/pictures/text_table.h"

namespace shardbook::pictures {
namespace {

constexpr double kScheduleBegin = 60;

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

/// Of a micro-batch, with a prime for each further chunk: 3 of chunk 0, 3' of
/// chunk 1.
std::string number_of(const pipeline::Action& action) {
  return std::to_string(action.micro_batch) +
         std::string(static_cast<std::size_t>(action.chunk), '\'');
}

/// The pixels of a box with room for this number.
double room_of(const std::string& number) {
  double room = 3;
  for (const char c : number) room += c == '\'' ? 2.6 : 6.8;
  return room;
}

/// The pixels of one unit of time in which all numbers have room.
double unit_of(const NamedSchedule& one) {
  double unit = 0;
  for (std::size_t rank = 0; rank < one.schedule.actions.size(); ++rank) {
    for (std::size_t i = 0; i < one.schedule.actions[rank].size(); ++i) {
      const pipeline::Span& span = one.replay.spans[rank][i];
      if (span.end <= span.begin) continue;
      unit = std::max(unit, room_of(number_of(one.schedule.actions[rank][i])) /
                                (span.end - span.begin));
    }
  }
  return unit;
}

}  // namespace

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
  const std::string title = topology.text() + ": ranks by coordinate";
  Figure figure(title, std::max(kName + kCell * columns, 360.0));
  std::string details;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const double y = figure.add_row(kHeight);
    figure.text(0, y + 16, rows[i][0]);
    for (std::size_t j = 1; j < rows[i].size(); ++j) {
      const double x = kName + kCell * static_cast<double>(j - 1);
      if (i > 0) {
        figure.colored_box({x, y, kCell - 2, kHeight - 2}, "#d5e3f2",
                           color_of("forward"));
        details += fmt::format("{}{} {}: rank {}", details.empty() ? "" : ", ",
                               rows[i][0], rows[0][j], rows[i][j]);
      }
      figure.middle(x + kCell / 2 - 1, y + 16, rows[i][j]);
    }
  }
  return {title + "\n" + text_table::align(rows), figure.svg(details), ""};
}

namespace {

// The lanes of all ranks; adds what they do to `kinds`.
void draw_lanes(Figure& figure, const NamedSchedule& one, double unit,
                std::set<std::string>& kinds) {
  constexpr double kRow = 24;
  const auto& [name, schedule, replay] = one;
  for (std::size_t rank = 0; rank < schedule.actions.size(); ++rank) {
    const double y = figure.add_row(kRow + 3);
    figure.text(0, y + 16, fmt::format("rank {}", rank));
    figure.box({kScheduleBegin, y, unit * replay.makespan, kRow}, "empty");
    bool is_second = false;  // second of a pair, drawn below the first
    for (std::size_t i = 0; i < schedule.actions[rank].size(); ++i) {
      const pipeline::Action& action = schedule.actions[rank][i];
      const pipeline::Span& span = replay.spans[rank][i];
      const double x = kScheduleBegin + unit * span.begin;
      const double width = std::max(unit * (span.end - span.begin) - 1, 0.6);
      const bool is_pair = action.overlaps_next || is_second;
      const Box box{x, y + (is_second ? kRow / 2 : 0), width,
                    is_pair ? kRow / 2 : kRow};
      is_second = action.overlaps_next;
      figure.box(box, class_of_action(action.kind));
      kinds.insert(class_of_action(action.kind));
      const std::string number = number_of(action);
      if (width + 1.01 > room_of(number)) {
        figure.middle(x + width / 2, box.y + box.height / 2 + 4.5, number,
                      "#ffffff");
      }
    }
  }
}

}  // namespace

Picture schedules(const std::string& title,
                  const std::vector<NamedSchedule>& all) {
  double unit = 0, makespan = 0;
  for (const NamedSchedule& one : all) {
    unit = std::max(unit, unit_of(one));
    makespan = std::max(makespan, one.replay.makespan);
  }
  const double length = std::clamp(unit * makespan, 700.0, 4000.0);
  unit = length / makespan;
  Figure figure(title, kScheduleBegin + length);
  std::set<std::string> kinds;
  std::string text, details;
  for (const NamedSchedule& one : all) {
    if (!one.name.empty()) {
      figure.heading(one.name);
      text += one.name + "\n";
    }
    draw_lanes(figure, one, unit, kinds);
    text += pipeline::draw(one.schedule, one.replay);
    details += fmt::format(
        "{}{} ranks take {:g} units of time and idle for {:.0f} %. ",
        one.name.empty() ? "" : one.name + ": ", one.schedule.actions.size(),
        one.replay.makespan, 100 * pipeline::idle_share(one.replay));
  }
  figure.axis(kScheduleBegin, kScheduleBegin + length, makespan, {"units", 1},
              "time");
  std::vector<std::pair<std::string, std::string>> legend;
  for (const auto& [kind, name] :
       {std::pair("forward", "forward"), std::pair("backward", "backward"),
        std::pair("weights", "gradients of weights"),
        std::pair("optimizer", "update")}) {
    if (kinds.count(kind) > 0) legend.emplace_back(kind, name);
  }
  legend.emplace_back("empty", "idle");
  figure.legend(legend);
  return {text, figure.svg(details), ""};
}

Picture schedule(const std::string& title, const pipeline::Schedule& schedule,
                 const pipeline::Replay& replay) {
  return schedules(title, {{"", schedule, replay}});
}

}  // namespace shardbook::pictures
