#pragma once

// The figures of the book's pages: SVG files beside them, drawn from runs on
// shapes, schedules, layouts and messages of the chapters' own code.
//
// Nothing in them depends on the machine, so a test can draw them again and
// compare. `chapter_NN.cpp` has the figures of chapter NN, drawn from runs on
// shapes, in virtual time.

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "chapters/pictures/plot.h"
#include "chapters/programs/sweep.h"
#include "sim/timeline_step.h"

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

using namespace pictures;

// The pages in reading order. Each has its own namespace, with its figures.
// clang-format off
#define SB_PAGES(DO) \
  DO(overview) DO(collectives) DO(00) DO(01) DO(02) DO(03) DO(04) \
  DO(05) DO(06) DO(07) DO(08) DO(09) DO(10) DO(11) DO(12) DO(13) DO(14) \
  DO(15)
#define SB_DECLARE(page) \
  namespace page_##page { std::vector<PageFigure> all(); }
// clang-format on
SB_PAGES(SB_DECLARE)

constexpr int kSteps = 3;

/// The end of a line: kSteps on shapes.
///
///   run("02_ddp" + on_shapes("textbook", 8, "gpt2", 16, 1024)).time.step_s
std::string on_shapes(const std::string& cluster, int world_size,
                      const std::string& model, std::int64_t batch,
                      std::int64_t seq);
/// A GPT of another size, for the model of on_shapes.
std::string gpt_of(double layers, double width, double heads, double vocabulary,
                   double positions);

/// "1/8", "4": a mark of a logarithmic axis.
std::string fraction(double value);

/// The last step of the first rank. Times count from its begin.
sim::RankTimeline first_rank(const Report& report);
/// The bytes that it sends in this step, by process group: "tp".
std::map<std::string, double> sent_by_group(const Report& report);

}  // namespace shardbook::figures
