// The engine: a config decides what the ranks do.

#include <fmt/format.h>

#include <algorithm>
#include <sstream>

#include "chapters/15_engine/strategies.h"
#include "chapters/common/run/program.h"
#include "chapters/figures/lane.h"
#include "chapters/figures/pages.h"
#include "chapters/figures/runs.h"
#include "comm/device_mesh.h"

namespace shardbook::figures::page_15 {
namespace {

using pictures::Figure;

struct Run {
  Report report;
  FoldClass fold_class;
};

Run train(const std::string& json) {
  Options options = on_shapes("dgx-a100", 4, "gpt2-medium", 32, 1024);
  const auto config = engine::DeepSpeedConfig::parse(json, "figure");
  const int dp = engine::data_parallel_ranks(options, config);
  engine::apply_config(config, dp, {}, options);
  const engine::Choice choice = engine::choose(options, config);
  ChapterRun chapter;
  chapter.fold_class = choice.fold_class;
  chapter.rank = [&](const Options& options, ProcessGroup& world,
                     shardbook::Run& run) {
    DeviceMesh mesh(world, choice.topology);
    const auto strategy = choice.make(options, mesh);
    run.train(options, *strategy);
  };
  return {run_and_compare(options, chapter), choice.fold_class};
}

// What the three configs differ in.
std::string config_of(const std::string& lines) {
  return R"({"train_batch_size": 32, "bf16": {"enabled": true},
  "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
)" + lines +
         "}";
}

std::string configs() {
  constexpr double kBegin = 290, kLane = 15, kLine = 16;
  const std::vector<std::string> all = {
      "\"zero_optimization\":\n  {\"stage\": 2}",
      "\"pipeline\": {\"stages\": 4},\n\"gradient_accumulation_steps\": 8",
      "\"pipeline\": {\"stages\": 2},\n\"gradient_accumulation_steps\": 8,\n"
      "\"shardbook\":\n  {\"tensor_parallel\": {\"size\": 2}}"};
  Figure figure(
      "A few lines of the config choose what four devices do\n"
      "One step of GPT-2 medium with 32 samples of 1024 tokens in bf16, on "
      "simulated A100",
      640);
  figure.legend({{"forward", "forward"},
                 {"backward", "backward"},
                 {"optimizer", "update"},
                 {"exposed", "waits for a message"},
                 {"bubble", "waits for a stage"}});
  std::vector<Run> runs;
  double longest = 0;
  for (const std::string& lines : all) {
    runs.push_back(train(config_of(lines)));
    longest = std::max(longest, runs.back().report.time.step_s);
  }
  const double pixels = (figure.width() - kBegin) / longest;
  std::string details;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const double top = figure.add_row(4 * kLane + 26) + 12;
    double y = top;
    std::istringstream lines(all[i]);
    for (std::string line; std::getline(lines, line); y += kLine) {
      const std::size_t indent = line.find_first_not_of(' ');
      figure.text(8.0 * static_cast<double>(indent), y + 12,
                  line.substr(indent));
    }
    const sim::StepView view = sim::last_step(runs[i].report.timelines);
    for (int rank = 0; rank < 4; ++rank) {
      for (const sim::RankGroup& group : view.groups) {
        // One rank of each class has run
        const FoldClass& class_of = runs[i].fold_class;
        if (class_of(group.ranks[0]) != class_of(rank)) continue;
        draw_lane(figure, group.timeline, "compute",
                  {kBegin, top + kLane * rank, pixels * view.step_s, kLane - 2},
                  pixels);
      }
    }
    details += fmt::format("{:.0f} ms. ", 1e3 * view.step_s);
  }
  figure.axis(kBegin, figure.width(), longest, {"ms", 1e-3}, "");
  return figure.svg(details);
}

}  // namespace

std::vector<PageFigure> all() {
  return {{"chapters/15_engine/configs.svg", configs}};
}

}  // namespace shardbook::figures::page_15
