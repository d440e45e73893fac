#pragma once

// Pictures that stand alone: one SVG with its title, text and colours, for
// pages without style or scripts, such as notebooks and their viewers.
//
//   Figure figure("A step computes for half of its time");
//   figure.legend({{"forward", "forward"}, {"backward", "backward"}});
//   const double y = figure.add_row(20);
//   figure.text(0, y + 14, "rank 0");
//   figure.box({110, y, 200, 20}, "forward");
//   figure.axis(110, 710, /*length=*/0.25, {"ms", 1e-3}, "virtual time");
//   figure.svg("rank 0 computes for 125 of 250 ms");
//
// Classes have the colours that report.css gives them on light pages. The
// ground is white: a picture can be read on a dark page as well.
// Elements have attributes alone: some viewers of notebooks drop styles,
// classes and references to other elements.

#include <string>
#include <utility>
#include <vector>

#include "chapters/pictures/units.h"

namespace shardbook::pictures {

/// "#c2570c" for "backward"; empty for a class that has no colour.
std::string color_of(const std::string& css_class);

/// Of texts, and of lines to compare with.
constexpr const char* kInk = "#1c1e21";
/// Of axes.
constexpr const char* kMuted = "#555c64";

/// The width of a picture in a notebook; others are as wide as a page.
constexpr double kNotebookWidth = 760;

/// Of texts on boxes.
constexpr const char* kWhite = "#ffffff";
/// Of lines behind curves.
constexpr const char* kPale = "#d8dbdf";

struct Box {
  double x = 0, y = 0, width = 0, height = 0;
};
struct Point {
  double x = 0, y = 0;
};

class Figure {
 public:
  enum class Anchor { kStart, kMiddle, kEnd };

  /// The first line of the title states what the picture shows; further lines are smaller.
  explicit Figure(const std::string& title, double width = 640);

  double width() const { return width_; }
  /// Appends room of this height at the bottom; returns where it begins.
  double add_row(double height);

  /// A row with the name of what is below it.
  void heading(const std::string& text);
  /// `y` is the base line. Every text has 12 pixels.
  void text(double x, double y, const std::string& text,
            Anchor anchor = Anchor::kStart, const std::string& color = kInk);
  void text(double x, double y, const std::string& text,
            const std::string& color);
  /// With `x` in their middle, or at their end.
  void middle(double x, double y, const std::string& text,
              const std::string& color = kInk);
  void end(double x, double y, const std::string& text,
           const std::string& color = kInk);
  void box(const Box& at, const std::string& css_class);
  /// A box of a colour: "#1f5594" or "hsl(137,60%,80%)".
  void colored_box(const Box& at, const std::string& color,
                   const std::string& stroke = "");
  /// A shape in the colour of a class, or in a colour.
  void path(const std::string& d, const std::string& css_class);
  void colored_path(const std::string& d, const std::string& color);
  void line(const std::string& d, const std::string& color, double width = 1,
            const std::string& dashes = "");
  void line(const std::vector<Point>& points, const std::string& color,
            double width = 1, const std::string& dashes = "");
  void dot(const Point& at, const std::string& color);

  /// Swatches with titles, in as many rows as they need.
  void legend(const std::vector<std::pair<std::string, std::string>>& entries);
  /// A row with round marks from 0 to `length`, which are the pixels `begin` to
  /// `end`; its name is at the left.
  void axis(double begin, double end, double length, const Unit& unit,
            const std::string& name);
  /// Lines across `at` at round numbers from `low` to `high`, with the numbers
  /// at its left, or at its right.
  void lines_across(const Box& at, double low, double high, const Unit& unit,
                    bool is_right = false);
  /// Texts at the right of `x`, as near to their heights as others allow.
  struct Label {
    double y = 0;
    std::string text, color;
  };
  void labels(double x, std::vector<Label> all);

  /// The finished picture; `details` is its description for screen readers.
  std::string svg(const std::string& details) const;

 private:
  void add_text(double x, double y, const std::string& text, Anchor anchor,
                const std::string& color, const std::string& more);

  double width_;
  double height_ = 0;
  std::string title_;
  std::string body_;
};

/// "M1 2L3 4", from point to point.
std::string path_of(const std::vector<Point>& points);
/// The pixels of a text as figures say it, about.
double text_width(const std::string& text);
/// "57.3", "110": a coordinate.
std::string px(double value);

}  // namespace shardbook::pictures
