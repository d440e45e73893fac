#pragma once

// Shapes that several pictures have.

#include <string>
#include <utility>
#include <vector>

#include "chapters/pictures/figure.h"
#include "chapters/pictures/palette.h"

namespace shardbook::pictures {

/// A straight line with a head at its end.
void arrow(Figure& figure, const Point& from, const Point& to,
           const std::string& color);
/// A thick one in ink, with a solid head.
void thick_arrow(Figure& figure, const Point& from, const Point& to);

/// A box with a text in its middle.
void named_box(Figure& figure, const Box& at, const std::string& color,
               const std::string& name, const std::string& ink = kWhite);

/// "rank 2", in its colour.
void rank_name(Figure& figure, double x, double y, int rank);

/// Boxes one behind the other, from the left edge of `at`: the pixels and the
/// class of each. Returns where the last one ends.
double stack(Figure& figure, const Box& at,
             const std::vector<std::pair<double, std::string>>& parts);

/// A line from end to end with bars across both: a deviation.
void whiskers(Figure& figure, const Point& from, const Point& to,
              const std::string& color);

}  // namespace shardbook::pictures
