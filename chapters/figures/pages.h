#pragma once

// The figures of each page, for figures.cpp, and what they are drawn with.

#include <vector>

#include "chapters/figures/figures.h"
#include "chapters/pictures/plot.h"
#include "chapters/pictures/shapes.h"

namespace shardbook::figures {

using namespace pictures;

// One namespace for each page
namespace page_overview {
std::vector<PageFigure> all();
}
namespace page_before {
std::vector<PageFigure> all();
}
namespace page_00 {
std::vector<PageFigure> all();
}
namespace page_01 {
std::vector<PageFigure> all();
}
namespace page_algorithms {
std::vector<PageFigure> all();
}
namespace page_02 {
std::vector<PageFigure> all();
}
namespace page_03 {
std::vector<PageFigure> all();
}
namespace page_04 {
std::vector<PageFigure> all();
}
namespace page_05 {
std::vector<PageFigure> all();
}
namespace page_06 {
std::vector<PageFigure> all();
}
namespace page_07 {
std::vector<PageFigure> all();
}
namespace page_08 {
std::vector<PageFigure> all();
}
namespace page_09 {
std::vector<PageFigure> all();
}
namespace page_10 {
std::vector<PageFigure> all();
}
namespace page_11 {
std::vector<PageFigure> all();
}
namespace page_12 {
std::vector<PageFigure> all();
}
namespace page_13 {
std::vector<PageFigure> all();
}
namespace page_14 {
std::vector<PageFigure> all();
}
namespace page_15 {
std::vector<PageFigure> all();
}
namespace page_which {
std::vector<PageFigure> all();
}

}  // namespace shardbook::figures
