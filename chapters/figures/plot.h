#pragma once

// Curves over numbers, linear or logarithmic, with a label at each curve.
//
//   const double y = Plot::row(figure, 220);
//   Plot plot(figure, {110, y, 400, 220}, {"tokens", 250, 4000, {}, true},
//             {"share of the step", 0, 1, {"%", 0.01}});
//   plot.curve(points, kBlue, "8 ranks");
//   plot.mark(1750, kBlue, "inequality: 1750");
//   plot.labels();

#include <functional>
#include <string>
#include <vector>

#include "chapters/pictures/figure.h"
#include "chapters/pictures/palette.h"
#include "chapters/pictures/units.h"

namespace shardbook::figures {

using pictures::kBlue;
using pictures::kGold;
using pictures::kGray;
using pictures::kGreen;
using pictures::kOrange;
using pictures::kPurple;
using pictures::Stroke;

struct Axis {
  std::string name = "";
  double low = 0, high = 1;
  pictures::Unit unit = {};
  bool is_log = false;
  /// Numbers on the axis; none: round ones, on a logarithmic axis powers of 2.
  std::vector<double> marks = {};
  /// Of a mark; none: with the unit.
  std::function<std::string(double)> text = {};
};

/// A curve's value.
struct Value {
  double x = 0, y = 0;
};

class Plot {
 public:
  /// Draws the axes around `at`, whose row has room for a line above it and two
  /// below: see row().
  Plot(pictures::Figure& figure, const pictures::Box& at, const Axis& x,
       const Axis& y);
  /// Adds room for a plot of this height; returns the top of its frame.
  static double row(pictures::Figure& figure, double height);

  pictures::Point at(double x, double y) const;
  /// The label is at the curve's end, behind a call of labels().
  void curve(const std::vector<Value>& values, const Stroke& stroke,
             const std::string& label = "");
  void dots(const std::vector<Value>& values, const Stroke& stroke);
  /// A line from bottom to top, and a text at the right of its upper end.
  void mark(double x, const Stroke& stroke, const std::string& text,
            double from_top = 0);
  void labels();

 private:
  pictures::Figure& figure_;
  pictures::Box box_;
  Axis x_, y_;
  std::vector<pictures::Figure::Label> labels_;
};

}  // namespace shardbook::figures
