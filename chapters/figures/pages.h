#pragma once

// The figures of each page, for figures.cpp, and what they are drawn with.

#include <vector>

#include "chapters/figures/figures.h"
#include "chapters/pictures/plot.h"
#include "chapters/pictures/shapes.h"

namespace shardbook::figures {

using namespace pictures;

// The pages in reading order. Each has a namespace, with its figures.
// clang-format off
#define SB_PAGES(DO) \
  DO(overview) DO(before) DO(algorithms) DO(00) DO(01) DO(02) DO(03) DO(04) \
  DO(05) DO(06) DO(07) DO(08) DO(09) DO(10) DO(11) DO(12) DO(13) DO(14) \
  DO(15) DO(which)
#define SB_DECLARE(page) \
  namespace page_##page { std::vector<PageFigure> all(); }
// clang-format on
SB_PAGES(SB_DECLARE)

}  // namespace shardbook::figures
