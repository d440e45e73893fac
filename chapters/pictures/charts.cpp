#include "chapters/pictures/charts.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <sstream>

#include "chapters/pictures/figure.h"
#include "chapters/pictures/svg.h"
#include "chapters/pictures/text_table.h"

namespace shardbook::pictures {
namespace {

// Neighbours are easy to tell apart.
constexpr std::array<const char*, 8> kColors = {"#2f6fb5", "#c2570c", "#2e7d4f",
                                                "#8a4bb0", "#9a7108", "#a93558",
                                                "#11767c", "#6a737c"};
const char* color(std::size_t i) { return kColors[i % kColors.size()]; }

std::string format_value(double value) { return fmt::format("{:.3g}", value); }

void add_title(Figure& figure, const std::string& title) {
  std::istringstream lines(title);
  double size = 14;
  for (std::string line; std::getline(lines, line); size = 12) {
    figure.text(0, figure.add_row(20) + 15, line, Figure::Anchor::kStart, size);
  }
  if (!title.empty()) figure.add_row(4);
}

}  // namespace

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
    rows.push_back({one.name, fmt::format("{:.4f}", one.values.front()),
                    fmt::format("{:.4f}", one.values.back())});
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

Picture bars(const std::vector<Bar>& all, const std::string& title) {
  constexpr double kName = 170, kValue = 130, kRow = 20;
  double most = 0;
  for (const Bar& bar : all) most = std::max(most, bar.value + bar.deviation);
  Figure figure;
  add_title(figure, title);
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
  return {text_table::align(rows), figure.svg(title.empty() ? "bars" : title),
          ""};
}

Picture curve(const std::vector<Bar>& points, const Bar& solid,
              const Bar& dashed, const std::string& title) {
  constexpr double kBegin = 60, kHeight = 200;
  double most = std::max(solid.value, dashed.value);
  for (const Bar& point : points) {
    most = std::max(most, point.value + point.deviation);
  }
  if (!(most > 0)) most = 1;
  const double top = 1.05 * most;
  Figure figure;
  add_title(figure, title);
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
  return {text_table::align(rows),
          figure.svg(title.empty() ? "a curve with deviations" : title), ""};
}

}  // namespace shardbook::pictures
