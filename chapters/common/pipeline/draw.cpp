#include "chapters/common/pipeline/replay.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"

namespace shardbook::pipeline {
namespace {

/// An action in the figure: columns [begin, end).
struct Box {
  std::string label;
  std::size_t begin = 0, end = 0;
};

constexpr std::size_t kMaxColumns = 2000;

double shortest_action(const Replay& replay) {
  double result = 0;
  for (const auto& spans : replay.spans) {
    for (const Span& span : spans) {
      const double length = span.end - span.begin;
      if (length > 0 && (result == 0 || length < result)) result = length;
    }
  }
  return result > 0 ? result : 1;
}

std::size_t column(double time, double tick) {
  return static_cast<std::size_t>(std::lround(time / tick));
}

std::vector<Box> boxes(const std::vector<Action>& list,
                       const std::vector<Span>& spans, double tick) {
  std::vector<Box> result;
  for (std::size_t i = 0; i < list.size(); ++i) {
    std::string label = to_string(list[i]);
    if (list[i].overlaps_next) label += "&" + to_string(list[++i]);
    const Span& span = spans[i];
    if (span.end <= span.begin) continue;
    const std::size_t begin = column(span.begin, tick);
    result.push_back(
        {label, begin, std::max(column(span.end, tick), begin + 1)});
  }
  return result;
}

}  // namespace

std::string draw(const Schedule& schedule, const Replay& replay, double tick) {
  if (tick <= 0) tick = shortest_action(replay);
  SB_CHECK(replay.makespan / tick <= kMaxColumns, "schedule '", schedule.name,
           "': a figure of ", replay.makespan / tick,
           " columns; give ticks that make at most ", kMaxColumns);
  std::vector<std::vector<Box>> rows;
  std::size_t width = 2;  // of a column, with the space behind it
  for (std::size_t rank = 0; rank < schedule.actions.size(); ++rank) {
    rows.push_back(boxes(schedule.actions[rank], replay.spans[rank], tick));
    for (const Box& box : rows.back()) {
      const std::size_t columns = box.end - box.begin;
      width = std::max(width, (box.label.size() + columns) / columns);
    }
  }
  const std::size_t columns = column(replay.makespan, tick) + 1;
  const std::size_t digits = std::to_string(schedule.actions.size() - 1).size();
  std::string text;
  for (std::size_t rank = 0; rank < rows.size(); ++rank) {
    std::string line(columns * width, ' ');
    for (std::size_t i = 0; i < column(replay.makespan, tick); ++i) {
      line[i * width] = '.';
    }
    for (const Box& box : rows[rank]) {
      const std::size_t length = (box.end - box.begin) * width - 1;
      std::string label = box.label;
      label.resize(std::max(length, label.size()),
                   box.end - box.begin > 1 ? '-' : ' ');
      line.replace(box.begin * width, label.size(), label);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    std::string number = std::to_string(rank);
    number.insert(0, digits - number.size(), ' ');
    text += "rank " + number + " |" + line + "\n";
  }
  return text;
}

}  // namespace shardbook::pipeline
