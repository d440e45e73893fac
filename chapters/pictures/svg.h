#pragma once

// Bars and curves of report.html. They are as wide as the page allows: the x
// axis runs from 0 to 1000 and is stretched, so no drawing contains text.
// Colours are classes, which the page's style defines for light and dark.

#include <string>
#include <utility>
#include <vector>

namespace shardbook::pictures::svg {

/// A horizontal bar, `share` of the width long. Its value is printed beside it.
std::string bar(double share, const std::string& css_class);
/// The same, with a deviation to both sides of its end.
std::string bar_with_error(double share, double deviation,
                           const std::string& css_class);

/// A bar of several parts, one behind the other: share and class of each.
std::string stacked_bar(
    const std::vector<std::pair<double, std::string>>& parts);

/// One value of a curve; all from 0 to 1, y from below.
struct Point {
  double x = 0, y = 0;
  double deviation = 0;
};
/// A curve with its deviations, and two values as lines across: one solid, one
/// dashed.
std::string curve(const std::vector<Point>& points, double solid, double dashed,
                  const std::string& title);

/// Columns beside each other, each with a name that the pointer shows, and a
/// dashed line across; heights from 0 to 1.
std::string columns(const std::vector<double>& heights,
                    const std::vector<std::string>& names, double dashed,
                    const std::string& title);

/// Bytes in the 64 letters that a URL or a script may contain, padded by =.
std::string base64(const std::string& bytes);

/// Text for HTML and for attributes in double quotes.
std::string escape(const std::string& text);

}  // namespace shardbook::pictures::svg
