#include "chapters/pictures/charts.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "chapters/pictures/figure.h"
#include "chapters/pictures/palette.h"
#include "chapters/pictures/text_table.h"

namespace shardbook::pictures {
namespace {

// Neighbours are easy to tell apart, in grey by their dashes.
constexpr std::array<Stroke, 6> kStrokes = {kBlue,   kOrange, kGreen,
                                            kPurple, kGold,   kRed};

using Rows = std::vector<text_table::Row>;

// Bars whose texts are written, and their table.
std::vector<Bar> with_texts(std::vector<Bar> all, const Unit& unit) {
  for (Bar& bar : all) {
    if (bar.text.empty()) bar.text = text(bar.value, unit);
  }
  return all;
}

Rows rows_of(const std::vector<Bar>& all) {
  Rows rows;
  for (const Bar& bar : all) rows.push_back({bar.name, bar.text});
  return rows;
}

std::string list_of(const std::vector<Bar>& all) {
  std::string list;
  for (const Bar& bar : all) {
    list += (list.empty() ? "" : "; ") + bar.name + " " + bar.text;
  }
  return list;
}

double most_of(const std::vector<Bar>& all) {
  double most = 0;
  for (const Bar& bar : all) most = std::max(most, bar.value + bar.deviation);
  return most > 0 ? most : 1;
}

double widest(const std::vector<std::string>& texts) {
  double width = 0;
  for (const std::string& each : texts) {
    width = std::max(width, text_width(each));
  }
  return width;
}

}  // namespace

Picture curves(const std::string& title, const std::vector<Series>& series,
               const std::string& what, const Unit& unit) {
  constexpr double kBegin = 70, kHeight = 220;
  double low = 0, high = 0;
  std::size_t most = 2;
  Rows rows = {{"", "first", "last"}};
  std::vector<std::string> names;
  std::string details;
  for (const Series& one : series) {
    if (one.values.empty()) continue;
    const auto [least, largest] =
        std::minmax_element(one.values.begin(), one.values.end());
    low = names.empty() ? *least : std::min(low, *least);
    high = names.empty() ? *largest : std::max(high, *largest);
    most = std::max(most, one.values.size());
    names.push_back(one.name);
    rows.push_back({one.name, fmt::format("{:.4f}", one.values.front()),
                    fmt::format("{:.4f}", one.values.back())});
    details +=
        fmt::format("{} of {} over {} steps: from {} to {}. ", what, one.name,
                    one.values.size(), rows.back()[1], rows.back()[2]);
  }
  if (!(high > low)) high = low + 1;
  const double margin = 0.03 * (high - low);
  low -= margin;
  high += margin;

  Figure figure(title, kNotebookWidth);
  figure.text(0, figure.add_row(16) + 10, what, kMuted);
  const Box at{kBegin, figure.add_row(kHeight + 4),
               figure.width() - kBegin - widest(names) - 10, kHeight};
  figure.lines_across(at, low, high, unit);
  std::vector<Figure::Label> labels;
  for (std::size_t s = 0; s < series.size(); ++s) {
    const std::vector<double>& values = series[s].values;
    if (values.empty()) continue;
    const Stroke& stroke = kStrokes[labels.size() % kStrokes.size()];
    std::vector<Point> points;
    for (std::size_t i = 0; i < values.size(); ++i) {
      points.push_back({at.x + at.width * static_cast<double>(i) /
                                   static_cast<double>(most - 1),
                        at.y + at.height * (high - values[i]) / (high - low)});
    }
    figure.line(points, stroke.color, 2, stroke.dashes);
    labels.push_back({points.back().y, series[s].name, stroke.color});
  }
  figure.axis(at.x, at.x + at.width, static_cast<double>(most - 1), {}, "step");
  figure.labels(at.x + at.width + 6, labels);
  return {text_table::align(rows), figure.svg(details), ""};
}

Picture bars(const std::string& title, const std::vector<Bar>& bars,
             const Unit& unit, const std::string& css_class) {
  constexpr double kBar = 20;
  const std::vector<Bar> all = with_texts(bars, unit);
  const double most = most_of(all);
  std::vector<std::string> names, texts;
  for (const Bar& bar : all) {
    names.push_back(bar.name);
    texts.push_back(bar.text);
  }
  Figure figure(title, kNotebookWidth);
  const double begin = widest(names) + 12;
  const double length = figure.width() - begin - widest(texts) - 12;
  for (const Bar& bar : all) {
    const double y = figure.add_row(kBar + 4);
    const double end = begin + length * std::max(bar.value, 0.0) / most;
    const double error = length * bar.deviation / most;
    figure.text(0, y + 14, bar.name);
    figure.box({begin, y, end - begin, kBar}, css_class);
    if (error > 0) {
      for (const double x : {end - error, end + error}) {
        figure.line({{x, y + 6}, {x, y + 14}}, kInk, 1.5);
      }
      figure.line({{end - error, y + 10}, {end + error, y + 10}}, kInk, 1.5);
    }
    figure.text(end + error + 6, y + 14, bar.text);
  }
  figure.axis(begin, begin + length, most, unit, "");
  return {text_table::align(rows_of(all)), figure.svg(list_of(all)), ""};
}

Picture curve(const std::string& title, const std::vector<Bar>& values,
              const std::string& what, const Bar& solid, const Bar& dashed,
              const Unit& unit) {
  constexpr double kBegin = 70, kHeight = 200;
  const std::vector<Bar> points = with_texts(values, unit);
  const std::vector<Bar> across = with_texts({solid, dashed}, unit);
  const double high = 1.05 * std::max(most_of(points), most_of(across));
  Figure figure(title, kNotebookWidth);
  const Box at{kBegin, figure.add_row(kHeight + 4),
               figure.width() - kBegin - widest({solid.name, dashed.name}) - 10,
               kHeight};
  const auto y_of = [&](double value) {
    return at.y + at.height * (1 - value / high);
  };
  figure.lines_across(at, 0, high, unit);
  std::vector<Figure::Label> labels;
  for (const Bar& bar : across) {
    figure.line({{at.x, y_of(bar.value)}, {at.x + at.width, y_of(bar.value)}},
                kInk, 1.5, labels.empty() ? "" : "6 4");
    labels.push_back({y_of(bar.value), bar.name, kInk});
  }
  const double names = figure.add_row(20) + 15;
  figure.text(0, names, what, kMuted);
  std::vector<Point> line;
  for (const Bar& point : points) {
    const double x = at.x + at.width *
                                (static_cast<double>(line.size()) + 0.5) /
                                static_cast<double>(points.size());
    line.push_back({x, y_of(point.value)});
    figure.middle(x, names, point.name);
    figure.dot(line.back(), color_of("time"));
    if (point.deviation > 0) {
      figure.line({{x, y_of(point.value - point.deviation)},
                   {x, y_of(point.value + point.deviation)}},
                  color_of("time"), 1.5);
    }
  }
  figure.line(line, color_of("time"), 2);
  figure.labels(at.x + at.width + 6, labels);
  Rows rows = rows_of(across);
  for (const text_table::Row& row : rows_of(points)) rows.push_back(row);
  return {text_table::align(rows),
          figure.svg(fmt::format("{}. By {}: {}", list_of(across), what,
                                 list_of(points))),
          ""};
}

Picture columns(const std::string& title, const std::vector<Series>& rows,
                const std::string& what, double even) {
  constexpr double kHeight = 60, kColumn = 34;
  double most = even;
  std::vector<std::string> names;
  std::size_t longest = 0;
  for (const Series& row : rows) {
    for (const double value : row.values) most = std::max(most, value);
    names.push_back(row.name);
    longest = std::max(longest, row.values.size());
  }
  Figure figure(title, kNotebookWidth);
  const double begin = widest(names) + 50;
  const double width = kColumn * static_cast<double>(longest);
  std::string details;
  for (const Series& row : rows) {
    const Box at{begin, figure.add_row(kHeight + 16) + 8, width, kHeight};
    const double line = at.y + kHeight * (1 - even / most);
    figure.text(0, at.y + kHeight / 2 + 4, row.name);
    figure.lines_across(at, 0, most, {});
    details += row.name + ":";
    for (std::size_t i = 0; i < row.values.size(); ++i) {
      const double height = kHeight * row.values[i] / most;
      const double x = begin + kColumn * static_cast<double>(i);
      figure.box({x + 4, at.y + kHeight - height, kColumn - 8, height}, "time");
      details += fmt::format(" {:.2f}", row.values[i]);
    }
    details += ". ";
    figure.line({{begin, line}, {begin + width, line}}, kInk, 1.5, "6 4");
    figure.text(begin + width + 6, line + 4, round_text(even, {}) + ": even");
  }
  const double y = figure.add_row(18) + 12;
  figure.text(0, y, what, kMuted);
  for (std::size_t i = 0; i < longest; ++i) {
    figure.middle(begin + kColumn * (static_cast<double>(i) + 0.5), y,
                  std::to_string(i));
  }
  return {"", figure.svg(details), ""};
}

}  // namespace shardbook::pictures
