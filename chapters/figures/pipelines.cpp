// GPipe.

#include <fmt/format.h>

#include "chapters/06_1f1b/schedules.h"
#include "chapters/common/pipeline/replay.h"
#include "chapters/figures/pages.h"
#include "chapters/figures/plot.h"
#include "chapters/figures/runs.h"
#include "chapters/pictures/layouts.h"

namespace shardbook::figures::page_05 {
namespace {

using pictures::Figure;

// A batch in `m` pieces: forward of a stage takes 8 units for all of them.
pictures::NamedSchedule gpipe_in(int m) {
  pipeline::schedules::ScheduleOptions options;
  options.num_ranks = 4;
  options.micro_batches = m;
  const pipeline::Schedule schedule =
      pipeline::schedules::make_schedule("gpipe", options);
  pipeline::Costs costs;
  costs.forward = 8.0 / m;
  costs.backward = 16.0 / m;
  const pipeline::Replay replay = pipeline::replay(schedule, costs);
  return {fmt::format("m = {}: idle for {:.0f} %", m,
                      100 * pipeline::idle_share(replay)),
          schedule, replay};
}

std::string bubble() {
  return pictures::schedules(
             "Twice as many micro-batches: the same work, and a smaller bubble",
             {gpipe_in(4), gpipe_in(8)})
      .svg;
}

std::string pieces() {
  std::vector<Value> times;
  for (const int m : {1, 2, 4, 8, 16, 32, 64}) {
    Options options = on_shapes("dgx-a100", 4, "gpt2-medium", 64, 512);
    options.dtype = DType::kBF16;
    options.steps = 2;
    times.push_back({static_cast<double>(m),
                     run_pipeline(options, "gpipe", m).time.step_s});
  }
  // What the bubble leaves of the time of one micro-batch
  std::vector<Value> formula;
  for (const Value& one : times) {
    formula.push_back({one.x, times[0].y * (one.x + 3) / (4 * one.x)});
  }
  Figure figure("More micro-batches shorten the step until they are too small",
                640);
  const double y = Plot::row(figure, 230);
  Plot plot(figure, {60, y, 440, 230}, {"micro-batches m", 1, 64, {}, true},
            {"a step of GPT-2 medium on 4 A100, 64 samples",
             0,
             1.1 * times[0].y,
             {"ms", 1e-3}});
  plot.curve(formula, kGray, "(m + p - 1) / m");
  plot.curve(times, kBlue, "simulated");
  plot.dots(times, kBlue);
  plot.labels();
  return figure.svg("");
}

}  // namespace

std::vector<PageFigure> all() {
  return {{"chapters/05_gpipe/bubble.svg", bubble},
          {"chapters/05_gpipe/pieces.svg", pieces}};
}

}  // namespace shardbook::figures::page_05
