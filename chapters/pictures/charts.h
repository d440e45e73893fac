#pragma once

// Numbers as curves and bars, with a table as their text. A title says what one
// sees; its further lines, after "\n", say what else one has to know.

#include <string>
#include <vector>

#include "chapters/pictures/figure.h"
#include "chapters/pictures/units.h"

namespace shardbook::pictures {

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
