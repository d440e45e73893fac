#include "chapters/pictures/shapes.h"

#include <cmath>

namespace shardbook::pictures {
namespace {

// Of length 1, from one point to another.
Point direction(const Point& from, const Point& to) {
  const double length = std::hypot(to.x - from.x, to.y - from.y);
  return {(to.x - from.x) / length, (to.y - from.y) / length};
}

}  // namespace

void arrow(Figure& figure, const Point& from, const Point& to,
           const std::string& color) {
  const double length = std::hypot(to.x - from.x, to.y - from.y);
  const double x = 6 * (to.x - from.x) / length;
  const double y = 6 * (to.y - from.y) / length;
  figure.line({from, to}, color, 1.2);
  figure.line({{to.x - x + 0.7 * y, to.y - y - 0.7 * x},
               to,
               {to.x - x - 0.7 * y, to.y - y + 0.7 * x}},
              color, 1.2);
}

void thick_arrow(Figure& figure, const Point& from, const Point& to) {
  constexpr double kHead = 7, kHalf = 4.5;
  const auto [dx, dy] = direction(from, to);
  const Point neck = {to.x - kHead * dx, to.y - kHead * dy};
  figure.line({from, neck}, kInk, 2);
  const Point left = {neck.x - kHalf * dy, neck.y + kHalf * dx};
  const Point right = {neck.x + kHalf * dy, neck.y - kHalf * dx};
  figure.colored_path(path_of({to, left, right}) + "z", kInk);
}

void named_box(Figure& figure, const Box& at, const std::string& color,
               const std::string& name, const std::string& ink) {
  figure.colored_box(at, color);
  figure.middle(at.x + at.width / 2, at.y + at.height / 2 + 4, name, ink);
}

void rank_name(Figure& figure, double x, double y, int rank) {
  figure.text(x, y, "rank " + std::to_string(rank), rank_color(rank));
}

double stack(Figure& figure, const Box& at,
             const std::vector<std::pair<double, std::string>>& parts) {
  double x = at.x;
  for (const auto& [pixels, css_class] : parts) {
    figure.box({x, at.y, pixels, at.height}, css_class);
    x += pixels;
  }
  return x;
}

void whiskers(Figure& figure, const Point& from, const Point& to,
              const std::string& color) {
  const auto [dx, dy] = direction(from, to);
  const double across = 4 * std::abs(dy), down = 4 * std::abs(dx);
  figure.line({from, to}, color, 1.5);
  for (const Point& end : {from, to}) {
    figure.line(
        {{end.x - across, end.y - down}, {end.x + across, end.y + down}}, color,
        1.5);
  }
}

}  // namespace shardbook::pictures
