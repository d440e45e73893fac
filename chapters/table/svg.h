#pragma once

// The drawings of report.html. They are as wide as the page allows: the x
// axis runs from 0 to 1000 and is stretched, so no drawing contains text.
// Colours are classes, which the page's style defines for light and dark.

#include <string>
#include <vector>

#include "sim/timeline_step.h"

namespace shardbook::table::svg {

/// One queue as a row of coloured blocks; neighbours of one category that are
/// too near to be told apart are one block. `attributes` go into the <svg>.
std::string lane(const sim::RankTimeline& timeline, const std::string& queue,
                 double step_s, const std::string& title,
                 const std::string& attributes);

/// Memory over time, stacked by kind, from 0 to `most_bytes`. Of samples that
/// fall on one spot the fullest is drawn.
std::string memory(const sim::RankTimeline& timeline, double step_s,
                   double most_bytes, const std::string& title,
                   const std::string& attributes);

/// A horizontal bar, `share` of the width long. What it says stands beside it.
std::string bar(double share, const std::string& css_class);
/// The same, with a deviation to both sides of its end.
std::string bar_with_error(double share, double deviation,
                           const std::string& css_class);

/// One value of a curve; all from 0 to 1, y from below.
struct Point {
  double x = 0, y = 0;
  double deviation = 0;
};
/// A curve with its deviations, and two values as lines across: one solid, one
/// dashed.
std::string curve(const std::vector<Point>& points, double solid,
                  double dashed, const std::string& title);

/// Text for HTML and for attributes in double quotes.
std::string escape(const std::string& text);

/// "forward", "backward", "optimizer", "comm", "copy", or "other".
std::string category_class(const std::string& category);

}  // namespace shardbook::table::svg
