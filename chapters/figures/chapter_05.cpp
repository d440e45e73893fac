// GPipe: the bubble, and the number of micro-batches.

#include <fmt/format.h>

#include "chapters/05_gpipe/gpipe_strategy.h"
#include "chapters/common/pipeline/replay.h"
#include "chapters/figures/figures.h"
#include "chapters/pictures/layouts.h"

namespace shardbook::figures::page_05 {

constexpr int kStages = 4;

std::string bubble() {
  // A stage's forward of the whole batch takes 8 units
  constexpr double kUnits = 8;
  std::vector<NamedSchedule> all;
  for (const int m : {4, 8}) {
    const pipeline::Schedule schedule = gpipe::schedule(kStages, m);
    pipeline::Costs costs;
    costs.forward = kUnits / m;
    costs.backward = 2 * kUnits / m;
    const pipeline::Replay replay = pipeline::replay(schedule, costs);
    const std::string name =
        fmt::format("{} micro-batches: {:g} units of time, idle for {:.0f} %",
                    m, replay.makespan, 100 * pipeline::idle_share(replay));
    all.push_back({name, schedule, replay});
  }
  return schedules(
             "With twice as many micro-batches, the bubble falls from 43 % to "
             "27 %\n"
             "One batch through four stages; a backward takes twice as long as "
             "a forward",
             all)
      .svg;
}

const std::string kGpipe = "05_gpipe --recompute never --partition time";

std::string pieces() {
  const std::vector<double> counts = {1, 2, 4, 8, 16, 24, 32, 48};
  const std::vector<Value> times =
      sweep(kGpipe + on_shapes("dgx-a100", kStages, "gpt2-medium", 96, 512) +
                " --dtype bf16",
            "--micro-batches", counts, step_s);
  // The devices' work is that of one piece, the host's that of 48
  const auto turns = [](double m) { return m + kStages - 1; };
  const double work = times.front().y / kStages;
  const double host = times.back().y / turns(counts.back());
  std::vector<Value> by_work, by_host;
  for (double m = 1; m <= counts.back(); ++m) {
    by_work.push_back({m, turns(m) / m * work});
    by_host.push_back({m, turns(m) * host});
  }
  Plot plot(
      "The step is shortest where the bubble is small and the host keeps up\n"
      "GPT-2 medium on 4 A100; a step has 49,152 tokens",
      {60, 420, 240}, logarithmic("micro-batches m", 1, 48, counts),
      {"a step", 0, 0.8, kMilliseconds});
  plot.curve(by_work, kGray, "bubble: (m + p - 1) / m");
  plot.curve(by_host, kOrange,
             fmt::format("host: (m + p - 1) {:.1f} ms", host / 1e-3));
  plot.dotted_curve(times, kBlue, "simulated");
  plot.mark(work / host, kPurple,
            fmt::format("equal at m = {:.1f}", work / host));
  return plot.svg();
}

std::string threshold() {
  constexpr double kShare = 0.2;
  Plot plot(
      "Above (p - 1)(1 - x)/x micro-batches, the bubble is below the share x\n"
      "GPT-2 medium in p stages on textbook; marked: the formula for x = 20 %",
      {50, 520, 250}, logarithmic("micro-batches m, of 8 samples each", 1, 32),
      {"idle share of a step", 0, 0.9, kPercent});
  plot.across(kShare, 1, "4 3");
  for (const auto& [stages, stroke] :
       {std::pair(2, kGreen), std::pair(4, kBlue), std::pair(7, kOrange)}) {
    const std::vector<Value> shares = sweep(
        [&, ranks = stages](double m) {
          return kGpipe + fmt::format(" --micro-batches {}", m) +
                 on_shapes("textbook", ranks, "gpt2-medium", 8 * m, 1024) +
                 " --steps 1";
        },
        {1, 2, 4, 8, 12, 16, 24, 32}, idle_share);
    plot.curve(shares, stroke, fmt::format("{} stages", stages));
    const double bound = (stages - 1) * (1 - kShare) / kShare;
    plot.figure().line({plot.at(bound, 0), plot.at(bound, kShare)},
                       stroke.color, 1.5, "4 3");
    plot.dots({{bound, kShare}}, stroke);
    plot.text(bound, kShare, fmt::format("m = {:g}", bound), stroke, {6, -8});
  }
  return plot.svg();
}

std::vector<PageFigure> all() {
  return {{"chapters/05_gpipe/bubble.svg", bubble},
          {"chapters/05_gpipe/pieces.svg", pieces},
          {"chapters/05_gpipe/threshold.svg", threshold}};
}

}  // namespace shardbook::figures::page_05
