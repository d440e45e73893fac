#pragma once

// The figures of the book's pages: SVG files beside them, drawn from runs on
// shapes, schedules, layouts and messages of the chapters' own code.
//
// Nothing in them depends on the machine, so a test can draw them again and
// compare. `chapter_NN.cpp` has the figures of chapter NN.

#include <string>
#include <vector>

namespace shardbook::figures {

struct PageFigure {
  std::string file = "";  ///< from the root of the book
  std::string (*draw)() = nullptr;
};

/// In reading order.
std::vector<PageFigure> all_figures();

/// The table of the Chinese figures, from the root of the book.
constexpr const char* kChinese = "chapters/figures/words.zh-CN.json";
/// Where a figure is in the language that figures speak now (pictures/words.h):
/// "chapters/overview.svg", "chapters/overview.zh-CN.svg".
std::string file_name(const PageFigure& figure);

/// The picture as it is in the file. Its colours follow the reader's choice of
/// light or dark; its coordinates are those of light.
std::string svg_file(const PageFigure& figure);

}  // namespace shardbook::figures
