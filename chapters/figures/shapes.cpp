#include "chapters/figures/shapes.h"

#include <cmath>

namespace shardbook::figures {

using pictures::Point;

void arrow(pictures::Figure& figure, const Point& from, const Point& to,
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

void named_box(pictures::Figure& figure, const pictures::Box& at,
               const std::string& color, const std::string& name) {
  figure.colored_box(at, color);
  figure.text(at.x + at.width / 2, at.y + at.height / 2 + 4, name,
              pictures::Figure::Anchor::kMiddle, "#ffffff");
}

}  // namespace shardbook::figures
