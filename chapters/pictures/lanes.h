#pragma once

// What queues do over time, in lanes on one axis.
//
//   Lanes lanes(figure, 90, figure.width(), /*length_s=*/0.25);
//   lanes.queue("network", timeline, "comm world", report.time.step_s, 16);
//   lanes.axis({"ms", 1e-3});

#include <string>

#include "chapters/pictures/figure.h"
#include "chapters/pictures/units.h"
#include "sim/timeline.h"

namespace shardbook::pictures {

class Lanes {
 public:
  /// The axis begins with time 0 at the pixel `begin`.
  Lanes(Figure& figure, double begin, double end, double length_s)
      : figure_(figure), begin_(begin), end_(end), length_s_(length_s) {}

  double pixels(double seconds) const {
    return (end_ - begin_) / length_s_ * seconds;
  }
  double x(double time_s) const { return begin_ + pixels(time_s); }
  /// A row with the name and the queue of a run of `step_s`; returns its top.
  double queue(const std::string& name, const sim::RankTimeline& timeline,
               const std::string& queue, double step_s, double height);
  /// The queue without a row. Waiting is thin: nothing runs. With numbers, each
  /// micro-batch is a box of its own, and has its number where there is room.
  void draw(const sim::RankTimeline& timeline, const std::string& queue,
            double step_s, double y, double height, bool has_numbers = false);
  /// A box in the middle of a row of `row_height`.
  void bar(double from_s, double to_s, double y, double row_height,
           double height, const std::string& css_class);
  void axis(const Unit& unit, const std::string& name = "time");

 private:
  void draw_numbers(const sim::RankTimeline& timeline, const std::string& queue,
                    double y, double height);

  Figure& figure_;
  double begin_, end_, length_s_;
};

}  // namespace shardbook::pictures
