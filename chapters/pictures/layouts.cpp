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
std::string line_name(const Topology& topology, int rank) {
  std::string name;
  for (const std::string& axis : topology.axes()) {
    if (axis == topology.axes().back()) break;
    name += fmt::format("{}{}={}", name.empty() ? "" : " ", axis,
                        topology.coordinate(rank, axis));
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

// Stripes from the lower left to the upper right.
void draw_stripes(Figure& figure, const Box& at) {
  const double right = at.x + at.width, bottom = at.y + at.height;
  std::string path;
  for (double x = at.x - at.height + 3; x < right; x += 6) {
    const double from = std::max(at.x - x, 0.0);
    const double to = std::min(right - x, at.height);
    if (to <= from) continue;
    path += fmt::format("M{} {}L{} {}", px(x + from), px(bottom - from),
                        px(x + to), px(bottom - to));
  }
  figure.line(path, kMuted);
}

// The lanes of all ranks; adds what they do to `kinds`.
void draw_lanes(Figure& figure, const NamedSchedule& one, double unit,
                std::set<std::string>& kinds) {
  constexpr double kRow = 24;
  const auto& [name, schedule, replay, below] = one;
  for (std::size_t rank = 0; rank < schedule.actions.size(); ++rank) {
    const double y = figure.add_row(kRow + (below ? 22 : 3));
    figure.text(0, y + 16, fmt::format("rank {}", rank));
    figure.box({kScheduleBegin, y, unit * replay.makespan, kRow}, "empty");
    double before = 0;
    const auto stripe_until = [&](double time) {
      if (time <= before) return;
      draw_stripes(figure, {kScheduleBegin + unit * before, y,
                            unit * (time - before) - 1, kRow});
    };
    bool is_second = false;  // second of a pair, drawn below the first
    for (std::size_t i = 0; i < schedule.actions[rank].size(); ++i) {
      const pipeline::Action& action = schedule.actions[rank][i];
      const pipeline::Span& span = replay.spans[rank][i];
      stripe_until(span.begin);
      before = std::max(before, span.end);
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
                      kWhite);
      }
      if (!below) continue;
      figure.middle(x + width / 2, y + kRow + 13,
                    below(static_cast<int>(rank), action),
                    class_of_action(action.kind));
    }
    stripe_until(replay.makespan);
  }
}

}  // namespace

Picture mesh(const Topology& topology) {
  constexpr double kCell = 44, kHeight = 24, kName = 150;
  const int columns = topology.sizes().back();
  std::vector<std::vector<std::string>> rows = {{""}};
  for (int c = 0; c < columns; ++c) {
    rows[0].push_back(fmt::format("{}={}", topology.axes().back(), c));
  }
  for (int rank = 0; rank < topology.world_size(); ++rank) {
    if (rank % columns == 0) rows.push_back({line_name(topology, rank)});
    rows.back().push_back(std::to_string(rank));
  }
  const std::string title = topology.text() + ": ranks by coordinate";
  Figure figure(title, std::max(kName + kCell * columns, 360.0));
  std::string details;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const double y = figure.add_row(kHeight);
    figure.text(0, y + 16, rows[i][0]);
    for (std::size_t j = 1; j < rows[i].size(); ++j) {
      const double x = kName + kCell * (j - 1);
      if (i > 0) {
        figure.framed_box({x, y, kCell - 2, kHeight - 2}, "#d5e3f2", "forward");
        details += fmt::format("{}{} {}: rank {}", details.empty() ? "" : ", ",
                               rows[i][0], rows[0][j], rows[i][j]);
      }
      figure.middle(x + kCell / 2 - 1, y + 16, rows[i][j]);
    }
  }
  return {title + "\n" + text_table::align(rows), figure.svg(details)};
}

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
  std::vector<std::string> legend;
  for (const char* entry :
       {"forward", "backward", "weights: gradients of weights",
        "optimizer: update"}) {
    const std::string name = entry;
    if (kinds.count(name.substr(0, name.find(':'))) > 0) legend.push_back(name);
  }
  legend.emplace_back("empty: striped: idle");
  figure.legend(legend);
  return {text, figure.svg(details)};
}

Picture schedule(const std::string& title, const pipeline::Schedule& schedule,
                 const pipeline::Replay& replay) {
  return schedules(title, {{"", schedule, replay}});
}

}  // namespace shardbook::pictures
