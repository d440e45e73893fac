// GPipe, and 1F1B with its family.

#include <fmt/format.h>

#include <algorithm>

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

namespace shardbook::figures::page_06 {
namespace {

using pictures::Figure;

pictures::NamedSchedule timed(const std::string& name, const std::string& title,
                              int p, int m) {
  pipeline::schedules::ScheduleOptions options;
  options.num_ranks = p;
  options.micro_batches = m;
  options.chunks = 2;
  const pipeline::Schedule schedule =
      pipeline::schedules::make_schedule(name, options);
  pipeline::Costs costs;
  if (schedule.num_stages > p) {  // a chunk is half of a stage
    costs.forward = costs.backward_input = costs.backward_weight = 0.5;
    costs.backward = 1;
  }
  return {title, schedule, pipeline::replay(schedule, costs)};
}

std::string orders() {
  return pictures::schedules(
             "Less idle time costs more activations, or a backward in two "
             "parts",
             {timed("gpipe", "GPipe: 8 sets of activations on rank 0", 4, 8),
              timed("1f1b", "1F1B: 4 sets", 4, 8),
              timed("zb-h1",
                    "ZB-H1: 4 sets, and gradients of weights fill the "
                    "bubble",
                    4, 8),
              timed("zb-h2", "ZB-H2: 7 sets", 4, 8)})
      .svg;
}

std::string trade() {
  struct Point {
    const char *name, *title;
    double above = 0;  // of its label
    bool is_left = false;
  };
  const std::vector<Point> points = {{"naive", "one after another"},
                                     {"gpipe", "GPipe", 0, true},
                                     {"1f1b", "1F1B"},
                                     {"interleaved", "interleaved, v = 2"},
                                     {"zb-h1", "ZB-H1", 4},
                                     {"zb-h2", "ZB-H2", 0, true},
                                     {"dualpipe", "DualPipe", -12}};
  Figure figure(
      "Fewer sets of activations, or less idle time\n"
      "A point per schedule, of 8 ranks and 16 micro-batches",
      640);
  const double y = Plot::row(figure, 260);
  Plot plot(
      figure, {50, y, 580, 260},
      {"sets of activations on the fullest rank, each of one stage", 0, 17},
      {"idle share of a rank, from its first action to its last",
       0,
       1,
       {"%", 0.01}});
  for (const Point& point : points) {
    const pictures::NamedSchedule one = timed(point.name, point.title, 8, 16);
    double sets = 0;
    for (const int each : pipeline::max_live_activations(
             one.schedule, pipeline::Until::kWeight)) {
      sets = std::max(sets, static_cast<double>(each));
    }
    if (one.schedule.num_stages == 16) sets /= 2;  // of half a stage
    const double idle = pipeline::window_bubble(one.replay);
    plot.dots({{sets, idle}}, kBlue);
    const pictures::Point at = plot.at(sets, idle);
    figure.text(at.x + (point.is_left ? -8 : 8), at.y + 4 - point.above,
                fmt::format("{}: {:.0f} %", point.title, 100 * idle),
                point.is_left ? Figure::Anchor::kEnd : Figure::Anchor::kStart);
  }
  return figure.svg("");
}

}  // namespace

std::vector<PageFigure> all() {
  return {{"chapters/06_1f1b/orders.svg", orders},
          {"chapters/06_1f1b/trade.svg", trade}};
}

}  // namespace shardbook::figures::page_06
