#pragma once

// Pictures that stand alone: one SVG with its own text and colours, for pages
// without style or scripts, such as notebooks and their viewers.
//
//   Figure figure(/*width=*/760);
//   figure.legend({{"forward", "forward"}, {"backward", "backward"}});
//   const double y = figure.add_row(20);
//   figure.text(0, y + 14, "rank 0");
//   figure.box({110, y, 200, 20}, "forward");
//   figure.svg("one step of one rank");
//
// Boxes are named by the classes of report.css and have its colours (those for
// light pages, on a white ground).

#include <string>
#include <utility>
#include <vector>

#include "chapters/pictures/svg.h"

namespace shardbook::pictures {

/// The attributes that draw an element of this class: fill="#2f6fb5". Empty for
/// a class that has no colour.
std::string paint_of(const std::string& css_class);
/// The drawing with each class replaced by its attributes.
std::string painted(const std::string& drawing);

struct Box {
  double x = 0, y = 0, width = 0, height = 0;
};

class Figure {
 public:
  enum class Anchor { kStart, kMiddle, kEnd };

  explicit Figure(double width = 760) : width_(width) {}

  double width() const { return width_; }
  /// Appends room of this height at the bottom; returns where it begins.
  double add_row(double height);

  /// `y` is the base line.
  void text(double x, double y, const std::string& text,
            Anchor anchor = Anchor::kStart, double size = 12,
            const std::string& color = "#1c1e21");
  void box(const Box& at, const std::string& css_class);
  /// A box of a colour: "#2f6fb5" or "hsl(137,60%,80%)".
  void colored_box(const Box& at, const std::string& color,
                   const std::string& stroke = "");
  /// A path with the attributes of a class.
  void path(const std::string& d, const std::string& css_class);
  /// A curve of one colour through points from 0 to 1, y from below.
  void curve(const std::vector<svg::Point>& points, const std::string& color,
             const Box& at);
  /// An SVG of svg.h, stretched over `at`.
  void place(const std::string& drawing, const Box& at);
  /// Swatches with titles, in as many rows as they need.
  void legend(const std::vector<std::pair<std::string, std::string>>& entries);
  /// Round marks below an axis of `length`, from pixel `begin` to `end`.
  template <typename Text>
  void axis(double begin, double end, double length, const Text& text_of) {
    const double y = add_row(20);
    for (const double at : marks(length, end - begin)) {
      mark(begin + (end - begin) * at / length, y, text_of(at));
    }
  }

  /// The finished picture; `title` is its text for screen readers.
  std::string svg(const std::string& title) const;

 private:
  void rect(const Box& at, const std::string& paint);
  static std::vector<double> marks(double length, double pixels);
  void mark(double x, double y, const std::string& text);

  double width_;
  double height_ = 0;
  std::string body_;
};

}  // namespace shardbook::pictures
