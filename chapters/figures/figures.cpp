#include "chapters/figures/figures.h"

#include <fmt/format.h>

#include <filesystem>
#include <utility>

#include "chapters/pictures/words.h"

namespace shardbook::figures {
namespace {

// A colour of light pages, and the one in its place on dark pages, as in
// chapters/table/report.css: tests/figures compares them.
std::vector<std::pair<std::string, std::string>> dark_colors() {
  return {{"#ffffff", "#14161a"},   {kInk, "#e6e8ea"},
          {kMuted, "#a6adb5"},      {"#d8dbdf", "#343a42"},
          {"empty", "#2a2f36"},     {"forward", "#6aa9ee"},
          {"backward", "#f6b98a"},  {"weights", "#c46a2e"},
          {"optimizer", "#52ab78"}, {"comm", "#c294e6"},
          {"exposed", "#d8569b"},   {"copy", "#9aa3ad"},
          {"other", "#d9b24c"},     {"kind-workspace", "#e887a3"},
          {"host", "#57c4c4"},      {"over", "#ff8f85"}};
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

std::string on_shapes(const std::string& cluster, int world_size,
                      const std::string& model, std::int64_t batch,
                      std::int64_t seq) {
  return fmt::format(
      " --backend sim --cluster {} --world-size {} --model '{}' --data random "
      "--batch {} --seq {} --steps {} --no-check",
      cluster, world_size, model, batch, seq, kSteps);
}

std::string gpt_of(double layers, double width, double heads, double vocabulary,
                   double positions) {
  return fmt::format(
      R"({{"n_layer": {}, "n_embd": {}, "n_head": {}, "vocab_size": {}, )"
      R"("n_positions": {}}})",
      layers, width, heads, vocabulary, positions);
}

std::string fraction(double value) {
  return value < 1 ? fmt::format("1/{:.0f}", 1 / value)
                   : fmt::format("{:.0f}", value);
}

sim::RankTimeline first_rank(const Report& report) {
  return sim::last_step(report.timelines).groups.at(0).timeline;
}

std::map<std::string, double> sent_by_group(const Report& report) {
  std::map<std::string, double> sent;
  for (const sim::TimelineEvent& event : first_rank(report).events) {
    if (event.category != "comm") continue;
    // "comm tp", "send pp"
    sent[event.queue.substr(event.queue.find(' ') + 1)] += event.bytes;
  }
  return sent;
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
      const std::string given =
          fmt::format("{}=\"{}\"", attribute, color_of(light));
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
