#pragma once

// Numbers as curves and bars, with a table as their text.

#include <string>
#include <vector>

#include "chapters/pictures/picture.h"

namespace shardbook::pictures {

/// Values of one curve, a step apart.
struct Series {
  std::string name = "";
  std::vector<double> values = {};
};
/// Curves over steps in one frame. The text has the first and the last values.
Picture curves(const std::vector<Series>& series);

struct Bar {
  std::string name = "";
  double value = 0;
  double deviation = 0;   ///< drawn to both sides of the bar's end
  std::string text = "";  ///< the value with its unit
};
/// Horizontal bars, the longest as wide as the picture, below the lines of the
/// title.
Picture bars(const std::vector<Bar>& all, const std::string& title = "");

/// A curve through these values with their deviations and names, and two values
/// to compare with as lines across.
Picture curve(const std::vector<Bar>& points, const Bar& solid,
              const Bar& dashed, const std::string& title = "");

}  // namespace shardbook::pictures
