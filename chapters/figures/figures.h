#pragma once

// The figures of the book's pages: SVG files beside them, drawn from runs on
// shapes, schedules, layouts and messages of the chapters' own code.
//
// Nothing in them depends on the machine, so a test can draw them again and
// compare. `chapter_NN.cpp` has the figures of chapter NN.

#include <string>
#include <vector>

#include "chapters/figures/words.h"

namespace shardbook::figures {

struct PageFigure {
  std::string file = "";  ///< from the root of the book
  std::string (*draw)() = nullptr;
};

/// In reading order.
std::vector<PageFigure> all_figures();

/// The picture as it is in the file, in English or in the language of `words`.
/// Its colours follow the reader's choice of light or dark; its coordinates are
/// those of light. Throws shardbook::Error, with the texts, when words lack some.
std::string svg_file(const PageFigure& figure, Words* words = nullptr);
/// "chapters/overview.svg", "chapters/overview.zh-CN.svg".
std::string file_name(const PageFigure& figure, const Words* words = nullptr);
/// The words of this book's figures.
Words chinese(const std::string& root);

}  // namespace shardbook::figures
