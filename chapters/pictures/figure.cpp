#include "chapters/pictures/figure.h"

#include <fmt/format.h>

#include <array>
#include <cmath>

#include "sim/timeline_step.h"

namespace shardbook::pictures {
namespace {

struct Paint {
  const char* css_class;
  const char* fill;
};
// As in report.css; tests/table compares them.
constexpr std::array<Paint, 22> kFills = {{
    {"forward", "#2f6fb5"},
    {"kind-parameter", "#2f6fb5"},
    {"time", "#2f6fb5"},
    {"backward", "#c2570c"},
    {"kind-gradient", "#c2570c"},
    {"weights", "#93420a"},
    {"optimizer", "#2e7d4f"},
    {"kind-optimizer_state", "#2e7d4f"},
    {"space", "#2e7d4f"},
    {"comm", "#8a4bb0"},
    {"exposed", "#dd4f98"},
    {"kind-communication", "#8a4bb0"},
    {"copy", "#6a737c"},
    {"kind-input", "#6a737c"},
    {"kind-activation", "#9a7108"},
    {"other", "#9a7108"},
    {"kind-workspace", "#a93558"},
    {"host", "#11767c"},
    {"bubble", "#6a737c"},
    {"rest", "#80888f"},
    {"empty", "#eceef0"},
    {"over", "#b3261e"},
}};

std::string line_paint(const char* color, double width, const char* more = "") {
  return fmt::format(
      "fill=\"none\" stroke=\"{}\" stroke-width=\"{}\" "
      "vector-effect=\"non-scaling-stroke\"{}",
      color, width, more);
}

constexpr double kSwatch = 10, kLegendRow = 18, kLetter = 6.4;

}  // namespace

std::string paint_of(const std::string& css_class) {
  for (const Paint& paint : kFills) {
    if (css_class == paint.css_class) {
      return fmt::format("fill=\"{}\"", paint.fill);
    }
  }
  if (css_class == "error") return line_paint("#1c1e21", 1.5);
  if (css_class == "line") return line_paint("#2f6fb5", 2.5);
  if (css_class == "solid") return line_paint("#c2570c", 1.5);
  if (css_class == "dashed") {
    return line_paint("#2e7d4f", 1.5, " stroke-dasharray=\"6 4\"");
  }
  return "";
}

std::string painted(const std::string& drawing) {
  const std::string mark = "class=\"";
  std::string text;
  std::size_t from = 0;
  for (std::size_t at; (at = drawing.find(mark, from)) != std::string::npos;) {
    const std::size_t name = at + mark.size();
    const std::size_t end = drawing.find('"', name);
    text += drawing.substr(from, at - from);
    text += paint_of(drawing.substr(name, end - name));
    from = end + 1;
  }
  return text + drawing.substr(from);
}

double Figure::add_row(double height) {
  const double y = height_;
  height_ += height;
  return y;
}

void Figure::text(double x, double y, const std::string& text, Anchor anchor,
                  double size, const std::string& color) {
  const char* name = anchor == Anchor::kStart    ? "start"
                     : anchor == Anchor::kMiddle ? "middle"
                                                 : "end";
  body_ += fmt::format(
      "<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\" font-size=\"{}\" "
      "fill=\"{}\">{}</text>\n",
      x, y, name, size, color, svg::escape(text));
}

void Figure::rect(const Box& at, const std::string& paint) {
  body_ += fmt::format(
      "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" "
      "{}/>\n",
      at.x, at.y, at.width, at.height, paint);
}

void Figure::box(const Box& at, const std::string& css_class) {
  rect(at, paint_of(css_class));
}

void Figure::colored_box(const Box& at, const std::string& color,
                         const std::string& stroke) {
  rect(at, fmt::format("fill=\"{}\"", color) +
               (stroke.empty() ? "" : fmt::format(" stroke=\"{}\"", stroke)));
}

void Figure::path(const std::string& d, const std::string& css_class) {
  if (!d.empty()) {
    body_ += fmt::format("<path {} d=\"{}\"/>\n", paint_of(css_class), d);
  }
}

void Figure::curve(const std::vector<svg::Point>& points,
                   const std::string& color, const Box& at) {
  std::string line;
  for (const svg::Point& point : points) {
    line += fmt::format("{}{:.1f} {:.1f}", line.empty() ? "M" : "L",
                        at.x + at.width * point.x,
                        at.y + at.height * (1 - point.y));
  }
  body_ += fmt::format(
      "<path d=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"2\"/>\n", line,
      color);
}

void Figure::place(const std::string& drawing, const Box& at) {
  std::string inner = painted(drawing);
  inner.insert(std::string("<svg").size(),
               fmt::format(" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" "
                           "height=\"{:.1f}\"",
                           at.x, at.y, at.width, at.height));
  body_ += inner + "\n";
}

void Figure::legend(
    const std::vector<std::pair<std::string, std::string>>& entries) {
  double x = 0;
  double y = entries.empty() ? 0 : add_row(kLegendRow);
  for (const auto& [css_class, title] : entries) {
    const double length =
        kSwatch + 22 + kLetter * static_cast<double>(title.size());
    if (x > 0 && x + length > width_) {
      x = 0;
      y = add_row(kLegendRow);
    }
    box({x, y + 3, kSwatch, kSwatch}, css_class);
    text(x + kSwatch + 5, y + 12, title);
    x += length;
  }
}

std::vector<double> Figure::marks(double length, double pixels) {
  const double distance =
      sim::axis_distance(length, static_cast<int>(pixels / 90));
  std::vector<double> all;
  if (distance <= 0) return all;
  const auto num = static_cast<int>(std::floor(length / distance + 1e-9));
  for (int i = 0; i <= num; ++i) all.push_back(i * distance);
  return all;
}

void Figure::mark(double x, double y, const std::string& label) {
  body_ += fmt::format(
      "<path d=\"M{:.1f} {:.1f}v6\" stroke=\"#555c64\" fill=\"none\"/>\n", x,
      y);
  // The last mark's text stays inside the picture.
  const double half = kLetter * static_cast<double>(label.size()) / 2;
  if (x + half > width_) {
    text(width_, y + 17, label, Anchor::kEnd, 11, "#555c64");
  } else {
    text(x, y + 17, label, Anchor::kMiddle, 11, "#555c64");
  }
}

std::string Figure::svg(const std::string& title) const {
  constexpr double kMargin = 10;
  return fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"{0} {0} {1:.0f} "
      "{2:.0f}\" width=\"{1:.0f}\" height=\"{2:.0f}\" "
      "font-family=\"sans-serif\" role=\"img\" aria-label=\"{3}\">\n"
      "<rect x=\"{0}\" y=\"{0}\" width=\"{1:.0f}\" height=\"{2:.0f}\" "
      "fill=\"#ffffff\"/>\n{4}</svg>\n",
      -kMargin, width_ + 2 * kMargin, height_ + 2 * kMargin, svg::escape(title),
      body_);
}

}  // namespace shardbook::pictures
