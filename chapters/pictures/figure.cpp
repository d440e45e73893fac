#include "chapters/pictures/figure.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <sstream>

#include "chapters/pictures/svg.h"
#include "chapters/pictures/text_table.h"
#include "chapters/pictures/words.h"
#include "sim/timeline_step.h"

namespace shardbook::pictures {
namespace {

struct Paint {
  const char* css_class;
  const char* fill;
};
// As in report.css; tests/notebooks compares them.
constexpr std::array<Paint, 22> kFills = {{
    {"forward", kBlue.color},
    {"kind-parameter", kBlue.color},
    {"time", kBlue.color},
    {"backward", kOrange.color},
    {"kind-gradient", kOrange.color},
    {"weights", "#5c2605"},
    {"optimizer", kGreen.color},
    {"kind-optimizer_state", kGreen.color},
    {"space", kGreen.color},
    {"comm", kPurple.color},
    {"exposed", "#dd4f98"},
    {"kind-communication", kPurple.color},
    {"copy", kSlate.color},
    {"kind-input", kSlate.color},
    {"kind-activation", kGold.color},
    {"other", kGold.color},
    {"kind-workspace", kRed.color},
    {"host", kTeal.color},
    {"bubble", kSlate.color},
    {"rest", "#80888f"},
    {"empty", "#eceef0"},
    {"over", "#b3261e"},
}};

constexpr double kSwatch = 10, kLegendRow = 18;

double width_of(const std::string& text) {
  return 6.6 * (text_table::width(text));
}

// A text in lines of at most `width` pixels, for letters of `size`. A line begins
// behind a space, or with a Chinese character.
std::vector<std::string> wrapped(const std::string& text, double width,
                                 double size) {
  const auto may_begin = [&](std::size_t i) {
    const bool is_chinese = text[i] >= '\xE4' && text[i] <= '\xE9';
    return text[i] == ' ' || (is_chinese && text[i - 1] != ' ');
  };
  std::vector<std::string> lines;
  for (std::size_t begin = 0, end = 0; begin < text.size(); begin = end) {
    do ++end;
    while (end < text.size() && !may_begin(end));
    const std::string piece = text.substr(begin, end - begin);
    if (!lines.empty() && width_of(lines.back() + piece) * size / 12 <= width) {
      lines.back() += piece;
    } else {
      lines.push_back(piece.substr(piece[0] == ' ' ? 1 : 0));
    }
  }
  return lines;
}

// Of length 1, from one point to another.
Point direction(const Point& from, const Point& to) {
  const double length = std::hypot(to.x - from.x, to.y - from.y);
  return {(to.x - from.x) / length, (to.y - from.y) / length};
}

}  // namespace

std::string color_of(const std::string& color) {
  for (const Paint& paint : kFills) {
    if (color == paint.css_class) return paint.fill;
  }
  return color;
}

double text_width(const std::string& text) { return width_of(said(text)); }

std::vector<double> round_marks(double low, double high, const Unit& unit,
                                double most) {
  const double step =
      unit.size * sim::axis_distance((high - low) / unit.size, most);
  std::vector<double> all;
  if (step <= 0) return all;
  for (double i = std::ceil(low / step - 1e-9); i <= high / step + 1e-9; ++i) {
    all.push_back(i * step + 0.0);  // not -0
  }
  return all;
}

std::string px(double value) {
  return fmt::format("{:g}", std::round(10 * value) / 10 + 0.0);
}

std::string path_of(const std::vector<Point>& points) {
  std::string d;
  for (const Point& point : points) {
    d +=
        fmt::format("{}{} {}", d.empty() ? "M" : "L", px(point.x), px(point.y));
  }
  return d;
}

Figure::Figure(const std::string& title, double width) : width_(width) {
  std::istringstream lines(title);
  std::getline(lines, title_);
  for (const std::string& line : wrapped(said(title_), width, 14.5)) {
    add_text(0, add_row(20) + 14, line, Anchor::kStart, kInk,
             " font-size=\"14\" font-weight=\"bold\"");
  }
  for (std::string rest; std::getline(lines, rest);) {
    for (const std::string& line : wrapped(said(rest), width, 12)) {
      add_text(0, add_row(18) + 13, line, Anchor::kStart, kInk, "");
    }
  }
  add_row(6);
}

double Figure::add_row(double height) {
  const double y = height_;
  height_ += height;
  return y;
}

void Figure::add_text(double x, double y, const std::string& text,
                      Anchor anchor, const std::string& color,
                      const std::string& more) {
  if (text.empty()) return;
  const char* name = anchor == Anchor::kStart    ? ""
                     : anchor == Anchor::kMiddle ? " text-anchor=\"middle\""
                                                 : " text-anchor=\"end\"";
  const std::string fill =
      color == kInk ? "" : fmt::format(" fill=\"{}\"", color_of(color));
  body_ += fmt::format("<text x=\"{}\" y=\"{}\"{}{}{}>{}</text>\n", px(x),
                       px(y), name, more, fill, svg::escape(text));
}

void Figure::heading(const std::string& text) {
  add_text(0, add_row(24) + 17, said(text), Anchor::kStart, kInk,
           " font-weight=\"bold\"");
}

void Figure::result(const std::string& text) {
  heading(text);
  describe(text);
}

void Figure::text(double x, double y, const std::string& text, Anchor anchor,
                  const std::string& color) {
  add_text(x, y, said(text), anchor, color, "");
}

void Figure::text(double x, double y, const std::string& words,
                  const std::string& color) {
  text(x, y, words, Anchor::kStart, color);
}

void Figure::middle(double x, double y, const std::string& words,
                    const std::string& color) {
  text(x, y, words, Anchor::kMiddle, color);
}

void Figure::end(double x, double y, const std::string& words,
                 const std::string& color) {
  text(x, y, words, Anchor::kEnd, color);
}

void Figure::rank_name(double x, double y, int rank) {
  text(x, y, fmt::format("rank {}", rank), rank_color(rank));
}

void Figure::framed_box(const Box& at, const std::string& color,
                        const std::string& frame, const std::string& text,
                        const std::string& ink) {
  body_ += fmt::format(
      "<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" fill=\"{}\"{}/>\n",
      px(at.x), px(at.y), px(at.width), px(at.height), color_of(color),
      frame.empty() ? "" : fmt::format(" stroke=\"{}\"", color_of(frame)));
  middle(at.x + at.width / 2, at.y + at.height / 2 + 4, text, ink);
}

void Figure::box(const Box& at, const std::string& color,
                 const std::string& text, const std::string& ink) {
  framed_box(at, color, "", text, ink);
}

double Figure::stack(const Box& at,
                     const std::vector<std::pair<double, std::string>>& parts) {
  double x = at.x;
  for (const auto& [pixels, color] : parts) {
    box({x, at.y, pixels, at.height}, color);
    x += pixels;
  }
  return x;
}

void Figure::path(const std::string& d, const std::string& color) {
  if (d.empty()) return;
  body_ += fmt::format("<path fill=\"{}\" d=\"{}\"/>\n", color_of(color), d);
}

void Figure::line(const std::string& d, const std::string& color, double width,
                  const std::string& dashes) {
  if (d.empty()) return;
  body_ += fmt::format(
      "<path fill=\"none\" stroke=\"{}\" stroke-width=\"{}\"{} d=\"{}\"/>\n",
      color_of(color), width,
      dashes.empty() ? "" : fmt::format(" stroke-dasharray=\"{}\"", dashes), d);
}

void Figure::line(const std::vector<Point>& points, const std::string& color,
                  double width, const std::string& dashes) {
  line(path_of(points), color, width, dashes);
}

void Figure::dot(const Point& at, const std::string& color) {
  body_ += fmt::format("<circle cx=\"{}\" cy=\"{}\" r=\"3\" fill=\"{}\"/>\n",
                       px(at.x), px(at.y), color_of(color));
}

void Figure::arrow(const Point& from, const Point& to,
                   const std::string& color) {
  const auto [dx, dy] = direction(from, to);
  const double x = 6 * dx, y = 6 * dy;
  line({from, to}, color, 1.2);
  line({{to.x - x + 0.7 * y, to.y - y - 0.7 * x},
        to,
        {to.x - x - 0.7 * y, to.y - y + 0.7 * x}},
       color, 1.2);
}

void Figure::thick_arrow(const Point& from, const Point& to) {
  constexpr double kHead = 7, kHalf = 4.5;
  const auto [dx, dy] = direction(from, to);
  const Point neck = {to.x - kHead * dx, to.y - kHead * dy};
  line({from, neck}, kInk, 2);
  const Point left = {neck.x - kHalf * dy, neck.y + kHalf * dx};
  const Point right = {neck.x + kHalf * dy, neck.y - kHalf * dx};
  path(path_of({to, left, right}) + "z", kInk);
}

void Figure::whiskers(const Point& from, const Point& to,
                      const std::string& color) {
  const auto [dx, dy] = direction(from, to);
  const double across = 4 * std::abs(dy), down = 4 * std::abs(dx);
  line({from, to}, color, 1.5);
  for (const Point& end : {from, to}) {
    line({{end.x - across, end.y - down}, {end.x + across, end.y + down}},
         color, 1.5);
  }
}

void Figure::legend(const std::vector<std::string>& entries) {
  double x = 0;
  double y = entries.empty() ? 0 : add_row(kLegendRow);
  for (const std::string& entry : entries) {
    const std::size_t colon = entry.find(": ");
    const std::string color = entry.substr(0, colon);
    const std::string title =
        colon == std::string::npos ? entry : entry.substr(colon + 2);
    const double length = kSwatch + 22 + text_width(title);
    if (x > 0 && x + length > width_) {
      x = 0;
      y = add_row(kLegendRow);
    }
    framed_box({x + 0.5, y + 3, kSwatch, kSwatch}, color,
               color == "empty" ? kMuted : "");
    text(x + kSwatch + 5, y + 12, title);
    x += length;
  }
}

void Figure::axis(double begin, double end, double length, const Unit& unit,
                  const std::string& name) {
  const double y = add_row(22);
  text(0, y + 18, name, Anchor::kStart, kMuted);
  for (const double mark : round_marks(0, length, unit, (end - begin) / 90)) {
    const double x = begin + (end - begin) * mark / length;
    const std::string label = round_text(mark, unit);
    line({{x, y}, {x, y + 6}}, kMuted);
    // The text of the last mark stays inside the picture.
    const bool is_last = x + text_width(label) / 2 > width_;
    text(is_last ? width_ : x, y + 18, label,
         is_last ? Anchor::kEnd : Anchor::kMiddle, kMuted);
  }
}

void Figure::labels(double x, std::vector<Label> all) {
  constexpr double kRow = 15;
  std::stable_sort(all.begin(), all.end(),
                   [](const Label& a, const Label& b) { return a.y < b.y; });
  // Neighbours that are too close move apart, up and down alike.
  for (std::size_t turn = 0; turn < 50; ++turn) {
    for (std::size_t i = 1; i < all.size(); ++i) {
      const double lack = kRow - (all[i].y - all[i - 1].y);
      if (lack <= 0) continue;
      all[i - 1].y -= lack / 2;
      all[i].y += lack / 2;
    }
  }
  for (const Label& label : all) {
    text(x, label.y + 4, label.text, Anchor::kStart, label.color);
  }
}

void Figure::describe(const std::string& sentence) {
  details_ += sentence + ". ";
}

std::string Figure::svg(const std::string& details) const {
  constexpr double kMargin = 10;
  std::string label = title_ + ". " + details_ + details;
  label.erase(label.find_last_not_of(' ') + 1);
  // Fonts of readers' systems, where sans-serif has no Chinese
  const std::string font =
      language().empty()
          ? "font-family=\"sans-serif\""
          : fmt::format(
                "xml:lang=\"{}\" font-family=\"sans-serif, PingFang "
                "SC, Microsoft YaHei, Noto Sans CJK SC\"",
                language());
  return fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"{0} {0} {1:.0f} "
      "{2:.0f}\" width=\"{1:.0f}\" height=\"{2:.0f}\" "
      "{7} font-size=\"12\" fill=\"{5}\" role=\"img\" "
      "aria-label=\"{4}\">\n"
      "<title>{3}</title>\n"
      "<rect x=\"{0}\" y=\"{0}\" width=\"{1:.0f}\" height=\"{2:.0f}\" "
      "fill=\"#ffffff\"/>\n{6}</svg>\n",
      -kMargin, width_ + 2 * kMargin, height_ + 2 * kMargin,
      svg::escape(said(title_)), svg::escape(said(label)), kInk, body_, font);
}

}  // namespace shardbook::pictures
