#pragma once

// Pictures that stand alone: one SVG with its title, text and colours, for
// pages without style or scripts, such as notebooks and their viewers.
//
//   Figure figure("A step computes for half of its time");
//   figure.legend({"forward", "backward", "empty: idle"});
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

#include <algorithm>
#include <array>
#include <cstddef>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "chapters/pictures/units.h"

namespace shardbook::pictures {

// --- Colours, as in chapters/table/report.css --------------------------------

/// Of texts, and of lines to compare with.
constexpr const char* kInk = "#1c1e21";
/// Of axes.
constexpr const char* kMuted = "#555c64";
/// Of texts on boxes.
constexpr const char* kWhite = "#ffffff";
/// Of lines behind curves.
constexpr const char* kPale = "#d8dbdf";

/// A colour, and dashes that tell its line from the others in grey.
struct Stroke {
  const char* color = "";
  const char* dashes = "";
};
constexpr Stroke kBlue = {"#1f5594", ""};
constexpr Stroke kOrange = {"#c2570c", "8 3"};
constexpr Stroke kGreen = {"#1d5c38", "2 3"};
constexpr Stroke kPurple = {"#8a4bb0", "12 3 2 3"};
constexpr Stroke kGold = {"#9a7108", "5 5"};
constexpr Stroke kTeal = {"#11767c", "2 6"};
constexpr Stroke kRed = {"#a93558", "1 5"};
constexpr Stroke kSlate = {"#6a737c", "8 3 2 3"};
/// Of lines to compare with: formulas, one device.
constexpr Stroke kGray = {kMuted, "3 3"};
constexpr Stroke kBlack = {kInk, ""};

/// A rank keeps its colour where ranks are the subject.
constexpr std::array<Stroke, 8> kRankStrokes = {kBlue, kOrange, kGreen, kPurple,
                                                kGold, kTeal,   kRed,   kSlate};
inline const char* rank_color(int rank) {
  return kRankStrokes[static_cast<std::size_t>(rank) % kRankStrokes.size()]
      .color;
}

/// A text, and the same as SVG or HTML (empty: the text alone).
struct Picture {
  std::string text = "";
  std::string svg = "";
  std::string html = "";
};

/// Every colour of a figure is the name of a class, or a value: "#c2570c" for
/// "backward", and for "#c2570c".
std::string color_of(const std::string& color);

/// The width of a picture in a notebook; others are as wide as a page.
constexpr double kNotebookWidth = 760;

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
  /// A heading that is a sentence of the description as well.
  void result(const std::string& text);
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
  /// A box with a text in its middle.
  void box(const Box& at, const std::string& color,
           const std::string& text = "", const std::string& ink = kWhite);
  void framed_box(const Box& at, const std::string& color,
                  const std::string& frame, const std::string& text = "",
                  const std::string& ink = kInk);
  /// Boxes one behind the other, from the left edge of `at`: the pixels and the
  /// colour of each. Returns where the last one ends.
  double stack(const Box& at,
               const std::vector<std::pair<double, std::string>>& parts);
  void path(const std::string& d, const std::string& color);
  void line(const std::string& d, const std::string& color, double width = 1,
            const std::string& dashes = "");
  void line(const std::vector<Point>& points, const std::string& color,
            double width = 1, const std::string& dashes = "");
  void dot(const Point& at, const std::string& color);
  /// A straight line with a head at its end.
  void arrow(const Point& from, const Point& to, const std::string& color);
  /// A thick one in ink, with a solid head.
  void thick_arrow(const Point& from, const Point& to);
  /// A line from end to end with bars across both: a deviation.
  void whiskers(const Point& from, const Point& to, const std::string& color);
  /// "rank 2", in its colour.
  void rank_name(double x, double y, int rank);

  /// Swatches with titles, in as many rows as they need: "comm: all-reduce", or
  /// "forward" for a colour of this name.
  void legend(const std::vector<std::string>& entries);
  /// A row with round marks from 0 to `length`, which are the pixels `begin` to
  /// `end`; its name is at the left.
  void axis(double begin, double end, double length, const Unit& unit,
            const std::string& name);
  /// Texts at the right of `x`, as near to their heights as others allow.
  struct Label {
    double y = 0;
    std::string text, color;
  };
  void labels(double x, std::vector<Label> all);

  /// Adds a sentence to the description, which screen readers read.
  void describe(const std::string& sentence);
  /// The finished picture; `details` ends its description.
  std::string svg(const std::string& details = "") const;

 private:
  void add_text(double x, double y, const std::string& text, Anchor anchor,
                const std::string& color, const std::string& more);

  double width_;
  double height_ = 0;
  std::string title_, details_;
  std::string body_;
};

/// The largest value_of(each), or member of each; 0 for none.
template <typename Range, typename ValueOf>
double most_of(const Range& all, const ValueOf& value_of) {
  double most = 0;
  for (const auto& each : all) {
    most = std::max(most, static_cast<double>(std::invoke(value_of, each)));
  }
  return most;
}

/// Round numbers from low to high: at most `most` of them, and one.
std::vector<double> round_marks(double low, double high, const Unit& unit,
                                double most);
/// "M1 2L3 4", from point to point.
std::string path_of(const std::vector<Point>& points);
/// The pixels of a text as figures say it, about.
double text_width(const std::string& text);
/// "57.3", "110": a coordinate.
std::string px(double value);

}  // namespace shardbook::pictures
