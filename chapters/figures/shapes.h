#pragma once

#include <string>

#include "chapters/pictures/figure.h"

namespace shardbook::figures {

/// A straight line with a head at its end.
void arrow(pictures::Figure& figure, const pictures::Point& from,
           const pictures::Point& to, const std::string& color);

/// A box with a border and a text in its middle.
void named_box(pictures::Figure& figure, const pictures::Box& at,
               const std::string& color, const std::string& name);

}  // namespace shardbook::figures
