// 1F1B and its family.

#include <fmt/format.h>

#include <algorithm>

#include "chapters/06_1f1b/schedules.h"
#include "chapters/common/pipeline/replay.h"
#include "chapters/figures/pages.h"
#include "chapters/figures/plot.h"
#include "chapters/pictures/layouts.h"

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
