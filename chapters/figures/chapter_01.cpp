// DataParallel: the main device is busy while the others wait.

#include <fmt/format.h>

#include "chapters/01_data_parallel/data_parallel_strategy.h"
#include "chapters/figures/lane.h"
#include "chapters/figures/pages.h"
#include "chapters/figures/plot.h"
#include "chapters/figures/runs.h"

namespace shardbook::figures::page_01 {
namespace {

using pictures::Figure;

// 24 samples suit 2, 3, 4, 6 and 8 devices.
Options on_gpus(int devices) {
  return on_shapes("dgx-v100", devices, "gpt2", 24, 512);
}

Report data_parallel_on(const Options& options) {
  ChapterRun chapter;
  chapter.devices = [](const Options& options,
                       const std::vector<Device>& devices, Run& run) {
    data_parallel::DataParallelStrategy strategy(options, devices);
    run.train(options, strategy);
  };
  return run_and_compare(options, chapter);
}

std::string step() {
  constexpr double kBegin = 80;
  const Report report = data_parallel_on(on_gpus(4));
  const sim::StepView view = sim::last_step(report.timelines);
  const double pixels = (560 - kBegin) / view.step_s;
  Figure figure(
      "Device 0 is always busy, and the others wait for it\n"
      "One step of GPT-2 on 4 V100",
      640);
  figure.legend({{"forward", "forward"},
                 {"backward", "backward"},
                 {"optimizer", "update"},
                 {"copy", "copies (thin: waits)"},
                 {"empty", "idle"}});
  figure.text(figure.width(), figure.add_row(18) + 13, "busy",
              Figure::Anchor::kEnd, pictures::kMuted);
  std::string details;
  for (const sim::RankGroup& group : view.groups) {
    for (const int device : group.ranks) {
      const double y = figure.add_row(27);
      const double busy = busy_s(group.timeline, "compute") / view.step_s;
      figure.text(0, y + 15, fmt::format("device {}", device));
      draw_lane(figure, group.timeline, "compute",
                {kBegin, y, pixels * view.step_s, 22}, pixels);
      figure.text(figure.width(), y + 15, fmt::format("{:.0f} %", 100 * busy),
                  Figure::Anchor::kEnd);
      details +=
          fmt::format("Device {} is busy for {:.0f} %. ", device, 100 * busy);
    }
  }
  figure.axis(kBegin, 560, view.step_s, {"ms", 1e-3}, "time");
  return figure.svg(details);
}

std::string hot_spot() {
  constexpr double kGB = 1e9;
  std::vector<Value> main, other, ring;
  for (const int n : {2, 3, 4, 6, 8}) {
    const Options options = on_gpus(n);
    const Report report = data_parallel_on(options);
    const Report ddp = run_ddp(options);
    const auto steps = static_cast<double>(options.steps);
    const auto x = static_cast<double>(n);
    main.push_back({x, report.ranks.front().bytes.counted / steps});
    other.push_back({x, report.ranks.back().bytes.counted / steps});
    ring.push_back({x, ddp.ranks.front().bytes.counted / steps});
  }
  Figure figure(
      "Device 0 sends more with every device, a rank of a ring hardly\n"
      "Bytes that leave a device in one step of GPT-2",
      640);
  const double y = Plot::row(figure, 220);
  Plot plot(figure, {50, y, 400, 220},
            {"devices n", 2, 8, {}, false, {2, 3, 4, 5, 6, 7, 8}},
            {"sent per step", 0, 8 * kGB, {"GB", kGB}});
  plot.curve(main, kOrange, "device 0");
  plot.curve(ring, kGreen, "a rank of a ring (DDP)");
  plot.curve(other, kBlue, "another device");
  plot.labels();
  return figure.svg("");
}

}  // namespace

std::vector<PageFigure> all() {
  return {{"chapters/01_data_parallel/step.svg", step},
          {"chapters/01_data_parallel/hot_spot.svg", hot_spot}};
}

}  // namespace shardbook::figures::page_01
