#include "chapters/pictures/plot.h"

#include <fmt/format.h>

#include <cmath>
#include <utility>

namespace shardbook::pictures {
namespace {

// From 0 to 1.
double share(const Axis& axis, double value) {
  if (axis.is_log)
    return std::log(value / axis.low) / std::log(axis.high / axis.low);
  return (value - axis.low) / (axis.high - axis.low);
}

std::vector<double> marks_of(const Axis& axis, double most) {
  if (!axis.marks.empty()) return axis.marks;
  std::vector<double> marks;
  if (axis.is_log) {
    for (double mark = axis.low; mark <= 1.001 * axis.high; mark *= 2) {
      marks.push_back(mark);
    }
    return marks;
  }
  return round_marks(axis.low, axis.high, axis.unit, most);
}

std::string text_of(const Axis& axis, double mark) {
  return axis.text ? axis.text(mark) : round_text(mark, axis.unit);
}

}  // namespace

Axis logarithmic(const std::string& name, double low, double high,
                 const std::vector<double>& marks,
                 const std::function<std::string(double)>& text) {
  return {name, low, high, {}, true, marks, text};
}

Axis marked(const std::string& name, const std::vector<double>& marks,
            const Unit& unit) {
  return {name, marks.front(), marks.back(), unit, false, marks};
}

double Plot::row(Figure& figure, double height) {
  const double y = figure.add_row(22 + height + 40);
  return y + 22;
}

Plot::Plot(const std::string& title, const PlotSize& size, const Axis& x,
           const Axis& y)
    : Plot(std::make_unique<Figure>(title, size.figure_width), size, x, y) {}

Plot::Plot(std::unique_ptr<Figure> own, const PlotSize& size, const Axis& x,
           const Axis& y)
    : Plot(*own, {size.left, row(*own, size.height), size.width, size.height},
           x, y) {
  own_ = std::move(own);
}

Plot::Plot(Figure& figure, const Box& at, const Axis& x, const Axis& y)
    : figure_(figure), box_(at), x_(x), y_(y) {
  const double bottom = at.y + at.height;
  figure.text(at.x, at.y - 10, y.name, kMuted);
  for (const double mark : marks_of(y, at.height / 35)) {
    const double height = bottom - at.height * share(y, mark);
    figure.line({{at.x, height}, {at.x + at.width, height}}, kPale);
    figure.end(at.x - 6, height + 4, text_of(y, mark), kMuted);
  }
  for (const double mark : marks_of(x, at.width / 70)) {
    const double left = at.x + at.width * share(x, mark);
    figure.line({{left, bottom}, {left, bottom + 5}}, kMuted);
    figure.middle(left, bottom + 18, text_of(x, mark), kMuted);
  }
  figure.middle(at.x + at.width / 2, bottom + 34, x.name, kMuted);
}

Point Plot::at(double x, double y) const {
  return {box_.x + box_.width * share(x_, x),
          box_.y + box_.height * (1 - share(y_, y))};
}

void Plot::curve(const std::vector<Value>& values, const Stroke& stroke,
                 const std::string& label) {
  std::vector<Point> points;
  for (const Value& value : values) points.push_back(at(value.x, value.y));
  if (points.empty()) return;
  figure_.line(points, stroke.color, 2, stroke.dashes);
  labels_.push_back({points.back().y, label, stroke.color});
  if (label.empty()) return;
  const auto said_of = [&](const Value& value) {
    return pictures::text(value.y, y_.unit) + " at " +
           round_text(value.x, {"", x_.unit.size});
  };
  ends_ += fmt::format("{}; from {} to {}. ", label, said_of(values.front()),
                       said_of(values.back()));
}

void Plot::dots(const std::vector<Value>& values, const Stroke& stroke) {
  for (const Value& value : values)
    figure_.dot(at(value.x, value.y), stroke.color);
}

void Plot::dotted_curve(const std::vector<Value>& values, const Stroke& stroke,
                        const std::string& label) {
  curve(values, stroke, label);
  dots(values, stroke);
}

void Plot::text(double x, double y, const std::string& text,
                const Stroke& stroke, const Point& by, Figure::Anchor anchor) {
  const Point point = at(x, y);
  figure_.text(point.x + by.x, point.y + by.y, text, anchor, stroke.color);
}

void Plot::mark(double x, const Stroke& stroke, const std::string& text,
                double from_top) {
  const double left = at(x, y_.low).x;
  figure_.line({{left, box_.y + from_top}, {left, box_.y + box_.height}},
               stroke.color, 1.5, "4 3");
  figure_.text(left + 5, box_.y + from_top + 10, text, stroke.color);
}

void Plot::across(double y, double width, const std::string& dashes) {
  figure_.line({at(x_.low, y), at(x_.high, y)}, kInk, width, dashes);
}

void Plot::labels() {
  figure_.labels(box_.x + box_.width + 6, labels_);
  labels_.clear();
}

std::string Plot::svg(const std::string& details) {
  labels();
  return figure_.svg(details.empty() ? ends_ : details);
}

}  // namespace shardbook::pictures
