// ZeRO and FSDP: what each stage shards, and when FSDP gathers.

#include <fmt/format.h>

#include <algorithm>

#include "chapters/03_zero_fsdp/zero/zero_memory.h"
#include "chapters/figures/lane.h"
#include "chapters/figures/pages.h"
#include "chapters/figures/plot.h"
#include "chapters/figures/runs.h"

namespace shardbook::figures::page_03 {
namespace {

using pictures::Figure;

std::string states() {
  constexpr double kParameters = 7.5e9, kRanks = 64, kBegin = 90, kMost = 120e9;
  Figure figure(
      "Each stage divides one more kind by the ranks\n"
      "7.5 billion parameters with Adam in mixed precision, on 64 ranks",
      640);
  figure.legend({{"kind-parameter", "parameters"},
                 {"kind-gradient", "gradients"},
                 {"kind-optimizer_state", "optimizer state"}});
  const double pixels = (figure.width() - kBegin - 70) / kMost;
  std::string details;
  for (int stage = 0; stage <= 3; ++stage) {
    const zero::ModelStates states =
        zero::model_states(stage, kParameters, static_cast<int>(kRanks));
    const double y = figure.add_row(32) + 4;
    const std::string name = stage == 0 ? "DDP" : fmt::format("ZeRO-{}", stage);
    figure.text(0, y + 16, name);
    double x = kBegin;
    for (const auto& [css_class, bytes] :
         {std::pair("kind-parameter", states.parameters),
          std::pair("kind-gradient", states.gradients),
          std::pair("kind-optimizer_state", states.optimizer)}) {
      figure.box({x, y, pixels * bytes, 22}, css_class);
      x += pixels * bytes;
    }
    const std::string total = fmt::format("{:.3g} GB", states.total() / 1e9);
    figure.text(x + 6, y + 16, total);
    details += fmt::format("{}: {}. ", name, total);
  }
  figure.axis(kBegin, kBegin + pixels * kMost, kMost, {"GB", 1e9}, "per rank");
  return figure.svg(details);
}

Report fsdp(const std::string& prefetch) {
  zero_fsdp::StrategyOptions setup;
  setup.backward_prefetch = prefetch;
  return run_sharded(on_shapes("textbook", 8, "gpt2", 16, 1024), setup);
}

std::string gathers() {
  constexpr double kBegin = 90;
  const std::vector<std::pair<std::string, Report>> runs = {
      {"gather the next unit while one computes", fsdp("pre")},
      {"gather a unit when it is needed", fsdp("none")}};
  Figure figure(
      "Gathers hide behind computation, if they begin one unit early\n"
      "FSDP, one step of GPT-2 on 8 ranks of the cluster textbook",
      640);
  figure.legend({{"forward", "forward"},
                 {"backward", "backward"},
                 {"optimizer", "optimizer"},
                 {"comm", "communication"},
                 {"exposed", "exposed"}});
  double longest = 0;
  for (const auto& [name, report] : runs) {
    longest = std::max(longest, report.time.step_s);
  }
  const double pixels = (figure.width() - kBegin) / longest;
  std::string details;
  for (const auto& [name, report] : runs) {
    const sim::RankTimeline step = first_rank(report);
    const std::string result =
        fmt::format("{}: {:.1f} ms, {:.1f} ms exposed", name,
                    1e3 * report.time.step_s, 1e3 * exposed_s(step));
    details += result + ". ";
    figure.heading(result);
    for (const std::string& queue : sim::queue_names(step)) {
      const double height = queue == "compute" ? 22 : 14;
      const double y = figure.add_row(height + 3);
      figure.text(0, y + height / 2 + 4, queue);
      draw_lane(figure, step, queue,
                {kBegin, y, pixels * report.time.step_s, height}, pixels);
    }
  }
  figure.axis(kBegin, figure.width(), longest, {"ms", 1e-3}, "time");
  return figure.svg(details);
}

// The bytes of parameters over time; a level holds until the next sample.
std::vector<Value> parameters(const Report& report) {
  std::vector<Value> values;
  for (const sim::MemorySample& sample : first_rank(report).memory) {
    const auto bytes = static_cast<double>(
        sample.bytes[static_cast<std::size_t>(MemoryKind::kParameter)]);
    if (!values.empty()) values.push_back({sample.time_s, values.back().y});
    values.push_back({sample.time_s, bytes});
  }
  return values;
}

std::string saw() {
  constexpr double kMiB = 1 << 20;
  const Report early = fsdp("pre"), late = fsdp("none");
  Figure figure(
      "FSDP has its shard, the root and one or two units\n"
      "Parameters of a rank in one step of GPT-2 on 8 ranks; under DDP, "
      "475 MiB",
      640);
  const double y = Plot::row(figure, 200);
  Plot plot(figure, {60, y, 565, 200},
            {"time", 0, late.time.step_s, {"ms", 1e-3}},
            {"parameters", 0, 300 * kMiB, {"MiB", kMiB}});
  plot.curve(parameters(early), kBlue);
  plot.curve(parameters(late), kOrange);
  const pictures::Point end = plot.at(early.time.step_s, 20 * kMiB);
  figure.text(end.x, end.y, "gathers one unit early", Figure::Anchor::kEnd,
              kBlue.color);
  const pictures::Point last = plot.at(late.time.step_s, 282 * kMiB);
  figure.text(last.x, last.y, "gathers when it is needed", Figure::Anchor::kEnd,
              kOrange.color);
  return figure.svg("");
}

}  // namespace

std::vector<PageFigure> all() {
  return {{"chapters/03_zero_fsdp/states.svg", states},
          {"chapters/03_zero_fsdp/gathers.svg", gathers},
          {"chapters/03_zero_fsdp/memory.svg", saw}};
}

}  // namespace shardbook::figures::page_03
