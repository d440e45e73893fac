#pragma once

// Curves over numbers, linear or logarithmic, with a label at each curve.
//
//   Plot plot("Tokens hide messages", {110, 400, 220},
//             logarithmic("tokens", 250, 4000),
//             {"share of the step", 0, 1, kPercent});
//   plot.curve(points, kBlue, "8 ranks");
//   plot.mark(1750, kBlue, "inequality: 1750");
//   plot.svg("from 80 % to 10 %");

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "chapters/pictures/figure.h"
#include "chapters/pictures/units.h"

namespace shardbook::pictures {

struct Axis {
  std::string name = "";
  double low = 0, high = 1;
  Unit unit = {};
  bool is_log = false;
  /// Numbers on the axis; none: round ones, on a logarithmic axis powers of 2.
  std::vector<double> marks = {};
  /// Of a mark; none: with the unit.
  std::function<std::string(double)> text = {};
};
Axis logarithmic(const std::string& name, double low, double high,
                 const std::vector<double>& marks = {},
                 const std::function<std::string(double)>& text = {});
/// A linear axis from the first to the last of its marks.
Axis marked(const std::string& name, const std::vector<double>& marks,
            const Unit& unit = {});

/// A curve's value.
struct Value {
  double x = 0, y = 0;
};

/// The frame of a plot, and the width of its figure.
struct PlotSize {
  double left = 0, width = 0, height = 0;
  double figure_width = 640;
};

class Plot {
 public:
  /// A figure with one plot.
  Plot(const std::string& title, const PlotSize& size, const Axis& x,
       const Axis& y);
  /// Draws the axes around `at`, whose row has room for a line above it and two
  /// below: see row().
  Plot(Figure& figure, const Box& at, const Axis& x, const Axis& y);
  /// Adds room for a plot of this height; returns the top of its frame.
  static double row(Figure& figure, double height);

  Figure& figure() { return figure_; }
  Point at(double x, double y) const;
  /// The label is at the curve's end, behind a call of labels().
  void curve(const std::vector<Value>& values, const Stroke& stroke,
             const std::string& label = "");
  void dots(const std::vector<Value>& values, const Stroke& stroke);
  /// Both.
  void dotted_curve(const std::vector<Value>& values, const Stroke& stroke,
                    const std::string& label = "");
  /// A text that begins at a value, or `by` pixels beside it; or that has it in
  /// its middle, or at its end.
  void text(double x, double y, const std::string& text, const Stroke& stroke,
            const Point& by = {},
            Figure::Anchor anchor = Figure::Anchor::kStart);
  void middle(double x, double y, const std::string& words,
              const Stroke& stroke, const Point& by = {}) {
    text(x, y, words, stroke, by, Figure::Anchor::kMiddle);
  }
  void end(double x, double y, const std::string& words, const Stroke& stroke,
           const Point& by = {}) {
    text(x, y, words, stroke, by, Figure::Anchor::kEnd);
  }
  /// A line from bottom to top, and a text at the right of its upper end.
  void mark(double x, const Stroke& stroke, const std::string& text,
            double from_top = 0);
  /// A line from left to right in ink.
  void across(double y, double width = 1.5, const std::string& dashes = "");
  void labels();
  void describe(const std::string& sentence) { figure_.describe(sentence); }
  /// The finished figure, with the labels. Without details, its description ends
  /// with the first and the last value of each labelled curve.
  std::string svg(const std::string& details = "");

 private:
  Plot(std::unique_ptr<Figure> own, const PlotSize& size, const Axis& x,
       const Axis& y);

  std::unique_ptr<Figure> own_;  // of one plot
  Figure& figure_;
  Box box_;
  Axis x_, y_;
  std::vector<Figure::Label> labels_;
  std::string ends_;
};

// --- Charts, with a table as their text. A title says what one sees; its further
// --- lines, after "\n", say what else one has to know.

/// Values of one curve, a step apart.
struct Series {
  std::string name = "";
  std::vector<double> values = {};
};
/// Curves over steps in one frame, each with its name at its end. `what` names
/// the values: "loss". The text has the first and the last values.
Picture curves(const std::string& title, const std::vector<Series>& series,
               const std::string& what, const Unit& unit = {});

struct Bar {
  std::string name = "";
  double value = 0;
  double deviation = 0;   ///< drawn to both sides of the bar's end
  std::string text = "";  ///< beside the bar; empty: the value with its unit
};
/// Horizontal bars from zero. The class gives them a colour by what they
/// measure: "time", "space" (of memory), "comm" (bytes sent), "bubble" (idle).
Picture bars(const std::string& title, const std::vector<Bar>& all,
             const Unit& unit, const std::string& css_class = "time");

/// A curve through these values with their deviations, from zero, over their
/// names, which `what` explains; and two values to compare with as lines across.
Picture curve(const std::string& title, const std::vector<Bar>& points,
              const std::string& what, const Bar& solid, const Bar& dashed,
              const Unit& unit);

/// A row of upright bars for each series, numbered from 0, and a dashed line
/// across at `even`. `what` names one bar: "expert".
Picture columns(const std::string& title, const std::vector<Series>& rows,
                const std::string& what, double even);

}  // namespace shardbook::pictures
