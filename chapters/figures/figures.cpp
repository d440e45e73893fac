#include "chapters/figures/figures.h"

#include <fmt/format.h>

#include <filesystem>
#include <utility>

#include "chapters/figures/pages.h"
#include "chapters/pictures/words.h"

namespace shardbook::figures {
namespace {

// A colour of light pages, and the one in its place on dark pages, as in
// chapters/table/report.css: tests/figures compares them.
std::vector<std::pair<std::string, std::string>> dark_colors() {
  return {{"#ffffff", "#14161a"},
          {kInk, "#e6e8ea"},
          {kMuted, "#a6adb5"},
          {"#d8dbdf", "#343a42"},
          {color_of("empty"), "#2a2f36"},
          {color_of("forward"), "#6aa9ee"},
          {color_of("backward"), "#f6b98a"},
          {color_of("weights"), "#c46a2e"},
          {color_of("optimizer"), "#52ab78"},
          {color_of("comm"), "#c294e6"},
          {color_of("exposed"), "#d8569b"},
          {color_of("copy"), "#9aa3ad"},
          {color_of("other"), "#d9b24c"},
          {color_of("kind-workspace"), "#e887a3"},
          {color_of("host"), "#57c4c4"},
          {color_of("over"), "#ff8f85"}};
}

}  // namespace

std::vector<PageFigure> all_figures() {
  std::vector<PageFigure> all;
#define SB_ALL(page) page_##page::all,
  for (const auto& page : {SB_PAGES(SB_ALL)}) {
    for (const PageFigure& figure : page()) all.push_back(figure);
  }
  return all;
}

std::string file_name(const PageFigure& figure) {
  const std::filesystem::path file = figure.file;
  return (file.parent_path() / file.stem()).string() +
         (language().empty() ? "" : "." + language()) + ".svg";
}

std::string svg_file(const PageFigure& figure) {
  const std::string svg = figure.draw();
  std::string rules;
  for (const auto& [light, dark] : dark_colors()) {
    for (const char* attribute : {"fill", "stroke"}) {
      const std::string given = fmt::format("{}=\"{}\"", attribute, light);
      const bool is_used = svg.find(given) != std::string::npos;
      if (!is_used || rules.find(given) != std::string::npos) continue;
      rules += fmt::format("[{}]{{{}:{}}}\n", given, attribute, dark);
    }
  }
  const std::size_t body = svg.find('\n') + 1;
  return fmt::format(
      "{}<style>@media(prefers-color-scheme:dark){{\n{}}}</style>\n{}",
      svg.substr(0, body), rules, svg.substr(body));
}

}  // namespace shardbook::figures
