
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>

#include "chapters/pictures/plot.h"
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

double end_of(const Bar& bar) { return bar.value + bar.deviation; }

// The pixels of the widest text.
template <typename Range, typename TextOf>
double widest(const Range& all, TextOf text_of) {
  return most_of(all, [&](const auto& each) {
    return text_width(std::invoke(text_of, each));
  });
}

// Of a plot with room for names of this width at its right.
PlotSize size_of(double names) {
  return {70, kNotebookWidth - 80 - names, 220, kNotebookWidth};
}

}  // namespace

Picture curves(const std::string& title, const std::vector<Series>& series,
               const std::string& what, const Unit& unit) {
  std::vector<Series> shown = series;
  std::erase_if(shown, [](const Series& one) { return one.values.empty(); });
  std::string details;
  Rows rows = {{"", "first", "last"}};
  double low = shown.empty() ? 0 : shown[0].values[0], high = low, most = 2;
  for (const auto& [name, values] : shown) {
    const auto [least, largest] =
        std::minmax_element(values.begin(), values.end());
    low = std::min(low, *least);
    high = std::max(high, *largest);
    most = std::max<double>(most, values.size());
    rows.push_back({name, fmt::format("{:.4f}", values.front()),
                    fmt::format("{:.4f}", values.back())});
    details += fmt::format("{} of {} over {} steps: from {} to {}. ", what,
                           name, values.size(), rows.back()[1], rows.back()[2]);
  }
  if (!(high > low)) high = low + 1;
  const double margin = 0.03 * (high - low);
  Plot plot(title, size_of(widest(shown, &Series::name)), {"step", 0, most - 1},
            {what, low - margin, high + margin, unit});
  std::size_t next = 0;
  for (const auto& [name, values] : shown) {
    std::vector<Value> points;
    for (const double value : values) {
      points.push_back({1.0 * points.size(), value});
    }
    plot.curve(points, kStrokes[next++ % kStrokes.size()], name);
  }
  return {text_table::align(rows), plot.svg(details)};
}

Picture bars(const std::string& title, const std::vector<Bar>& bars,
             const Unit& unit, const std::string& css_class) {
  constexpr double kBar = 20;
  const std::vector<Bar> all = with_texts(bars, unit);
  const double longest = most_of(all, end_of);
  const double most = longest > 0 ? longest : 1;
  Figure figure(title, kNotebookWidth);
  const double begin = widest(all, &Bar::name) + 12;
  const double length = figure.width() - begin - widest(all, &Bar::text) - 12;
  for (const Bar& bar : all) {
    const double y = figure.add_row(kBar + 4);
    const double end = begin + length * std::max(bar.value, 0.0) / most;
    const double error = length * bar.deviation / most;
    figure.text(0, y + 14, bar.name);
    figure.box({begin, y, end - begin, kBar}, css_class);
    if (error > 0) {
      figure.whiskers({end - error, y + 10}, {end + error, y + 10}, kInk);
    }
    figure.text(end + error + 6, y + 14, bar.text);
  }
  figure.axis(begin, begin + length, most, unit, "");
  return {text_table::align(rows_of(all)), figure.svg(list_of(all))};
}

Picture curve(const std::string& title, const std::vector<Bar>& values,
              const std::string& what, const Bar& solid, const Bar& dashed,
              const Unit& unit) {
  const std::vector<Bar> points = with_texts(values, unit);
  const std::vector<Bar> across = with_texts({solid, dashed}, unit);
  const double most =
      std::max(most_of(points, end_of), most_of(across, end_of));
  Axis x = {what, -0.5, std::max(points.size(), std::size_t{1}) - 0.5};
  std::vector<Value> line;
  for (const Bar& point : points) {
    x.marks.push_back(line.size());
    line.push_back({1.0 * line.size(), point.value});
  }
  x.text = [&](double mark) {
    return points.empty() ? "" : points[std::lround(mark)].name;
  };
  Plot plot(title, size_of(widest(across, &Bar::name)), x,
            {"", 0, 1.05 * (most > 0 ? most : 1), unit});
  for (const Bar& bar : across) {
    plot.curve({{x.low, bar.value}, {x.high, bar.value}},
               {kInk, &bar == &across[0] ? "" : "6 4"}, bar.name);
  }
  plot.dotted_curve(line, kBlue);
  for (std::size_t i = 0; i < points.size(); ++i) {
    const auto [name, value, deviation, text] = points[i];
    if (deviation == 0) continue;
    plot.figure().line(
        {plot.at(i, value - deviation), plot.at(i, value + deviation)},
        kBlue.color, 1.5);
  }
  Rows rows = rows_of(across);
  for (const text_table::Row& row : rows_of(points)) rows.push_back(row);
  return {text_table::align(rows),
          plot.svg(fmt::format("{}. By {}: {}", list_of(across), what,
                               list_of(points)))};
}

Picture columns(const std::string& title, const std::vector<Series>& rows,
                const std::string& what, double even) {
  constexpr double kHeight = 84, kColumn = 38;
  double most = even, longest = 0;
  for (const Series& row : rows) {
    most = std::max(most, most_of(row.values, std::identity()));
    longest = std::max<double>(longest, row.values.size());
  }
  const double begin = widest(rows, &Series::name) + 12;
  const double right = begin + kColumn * longest;
  Figure figure(title, std::max(right + 46, 440.0));
  for (const Series& row : rows) {
    const double bottom = figure.add_row(kHeight + 30) + 22 + kHeight;
    const auto y_of = [&](double value) {
      return bottom - kHeight * value / most;
    };
    figure.text(0, bottom - kHeight / 2 + 4, row.name);
    double x = begin;
    for (const double value : row.values) {
      // Beyond an even load, in another colour
      const double top = y_of(value), edge = y_of(std::min(value, even));
      figure.box({x + 4, edge, kColumn - 8, bottom - edge}, kBlue.color);
      if (value > even) {
        figure.box({x + 4, top, kColumn - 8, edge - top}, kOrange.color);
      }
      // Inside the bar where the even line is just above it
      const bool is_inside = value > even / 2 && value <= even;
      figure.middle(x + kColumn / 2, top + (is_inside ? 14 : -5),
                    fmt::format("{:.2f}", value), is_inside ? kWhite : kInk);
      x += kColumn;
    }
    figure.describe(
        fmt::format("{}: {:.2f}", row.name, fmt::join(row.values, " ")));
    figure.line({{begin, y_of(even)}, {right, y_of(even)}}, kInk, 1.5, "6 4");
    figure.line({{begin, bottom}, {right, bottom}}, kMuted);
    figure.text(right + 6, y_of(even) + 4, "even");
  }
  const double y = figure.add_row(18) + 12;
  figure.text(0, y, what, kMuted);
  for (int i = 0; i < longest; ++i) {
    figure.middle(begin + kColumn * (i + 0.5), y, std::to_string(i));
  }
  return {"", figure.svg()};
}

}  // namespace shardbook::pictures
