#include "chapters/pictures/svg.h"

#include <fmt/format.h>

#include <algorithm>

namespace shardbook::pictures::svg {
namespace {

constexpr double kWidth = 1000;
constexpr double kCurveHeight = 100;

std::string open(double height, const std::string& css_class,
                 const std::string& title, const std::string& attributes) {
  return fmt::format(
      "<svg class=\"{}\" viewBox=\"0 0 {} {}\" preserveAspectRatio=\"none\" "
      "role=\"img\" aria-label=\"{}\" {}>",
      css_class, kWidth, height, escape(title), attributes);
}

std::string bar_of(const std::string& drawing) {
  return fmt::format(
      "<svg class=\"bar\" viewBox=\"0 0 {} 10\" preserveAspectRatio=\"none\" "
      "aria-hidden=\"true\">{}</svg>",
      kWidth, drawing);
}

std::string rect_of(double share, const std::string& css_class) {
  return fmt::format("<rect class=\"{}\" width=\"{:.1f}\" height=\"10\"/>",
                     css_class, kWidth * std::clamp(share, 0.0, 1.0));
}

}  // namespace

std::string bar(double share, const std::string& css_class) {
  return bar_of(rect_of(share, css_class));
}

std::string bar_with_error(double share, double deviation,
                           const std::string& css_class) {
  const double from = kWidth * std::clamp(share - deviation, 0.0, 1.0);
  const double to = kWidth * std::clamp(share + deviation, 0.0, 1.0);
  return bar_of(rect_of(share, css_class) +
                fmt::format("<path class=\"error\" d=\"M{0:.1f} 5H{1:.1f}"
                            "M{0:.1f} 2V8M{1:.1f} 2V8\"/>",
                            from, to));
}

std::string stacked_bar(
    const std::vector<std::pair<double, std::string>>& parts) {
  std::string rects;
  double begin = 0;
  for (const auto& [share, css_class] : parts) {
    const double length = std::clamp(share, 0.0, 1 - begin);
    if (kWidth * length < 1) continue;
    rects += fmt::format(
        "<rect class=\"{}\" x=\"{:.1f}\" width=\"{:.1f}\" height=\"10\"/>",
        css_class, kWidth * begin, kWidth * length);
    begin += length;
  }
  return bar_of(rects);
}

std::string curve(const std::vector<Point>& points, double solid, double dashed,
                  const std::string& title) {
  const auto at = [](double y) { return kCurveHeight * (1 - y); };
  std::string line, errors;
  for (const Point& point : points) {
    const double x = kWidth * point.x;
    line += fmt::format("{}{:.1f} {:.1f}", line.empty() ? "M" : "L", x,
                        at(point.y));
    errors +=
        fmt::format("M{:.1f} {:.1f}V{:.1f}", x, at(point.y - point.deviation),
                    at(point.y + point.deviation));
  }
  return open(kCurveHeight, "curve", title, "") +
         fmt::format(
             "<path class=\"solid\" d=\"M0 {0:.1f}H{1}\"/>"
             "<path class=\"dashed\" d=\"M0 {2:.1f}H{1}\"/>"
             "<path class=\"error\" d=\"{3}\"/>"
             "<path class=\"line\" d=\"{4}\"/></svg>",
             at(solid), kWidth, at(dashed), errors, line);
}

std::string columns(const std::vector<double>& heights,
                    const std::vector<std::string>& names, double dashed,
                    const std::string& title) {
  const double place = kWidth / static_cast<double>(heights.size());
  std::string rects;
  for (std::size_t i = 0; i < heights.size(); ++i) {
    const double height = kCurveHeight * std::clamp(heights[i], 0.0, 1.0);
    rects += fmt::format(
        "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" "
        "height=\"{:.1f}\"><title>{}</title></rect>",
        place * (static_cast<double>(i) + 0.1), kCurveHeight - height,
        0.8 * place, height, escape(names[i]));
  }
  return open(kCurveHeight, "columns", title, "") + rects +
         fmt::format("<path d=\"M0 {:.1f}H{}\"/></svg>",
                     kCurveHeight * (1 - dashed), kWidth);
}

std::string base64(const std::string& bytes) {
  constexpr const char* kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  for (std::size_t i = 0; i < bytes.size(); i += 3) {
    unsigned three = 0;
    for (std::size_t k = i; k < i + 3; ++k) {
      three = three << 8 |
              (k < bytes.size() ? static_cast<unsigned char>(bytes[k]) : 0U);
    }
    for (std::size_t k = 0; k < 4; ++k) {
      text += i + k <= bytes.size() ? kDigits[three >> (18 - 6 * k) & 63] : '=';
    }
  }
  return text;
}

std::string escape(const std::string& text) {
  std::string safe;
  for (const char c : text) {
    safe += c == '&'   ? "&amp;"
            : c == '<' ? "&lt;"
            : c == '>' ? "&gt;"
            : c == '"' ? "&quot;"
                       : std::string(1, c);
  }
  return safe;
}

}  // namespace shardbook::pictures::svg
