// Model parallelism: in turn, or at the same time in splits.

#include <fmt/format.h>

#include "chapters/04_model_parallel/split_sweep.h"
#include "chapters/figures/lane.h"
#include "chapters/figures/pages.h"
#include "chapters/figures/plot.h"
#include "chapters/figures/runs.h"

namespace shardbook::figures::page_04 {
namespace {

using pictures::Figure;

// The experiment of PyTorch's tutorial, on two T4.
Options on_t4s() {
  Options options = on_shapes("kaggle-t4x2", 2, "resnet50", 120, 1);
  options.chapter = "04_model_parallel";
  options.optimizer = "sgd";
  options.image_size = 128;
  return options;
}

model_parallel::Settings settings_of(const std::string& variant,
                                     std::int64_t split_size) {
  model_parallel::Settings settings;
  settings.variant = variant;
  settings.split_size = split_size;
  return settings;
}

Report run(const model_parallel::Settings& settings) {
  ChapterRun chapter;
  chapter.cores_shared_by = 2;
  chapter.devices = [&](const Options& options,
                        const std::vector<Device>& devices, Run& run) {
    model_parallel::ModelParallelStrategy strategy(options, settings, devices,
                                                   1);
    run.train(options, strategy);
  };
  return run_and_compare(on_t4s(), chapter);
}

std::string turns() {
  constexpr double kBegin = 70;
  Figure figure(
      "In splits, both devices work at the same time\n"
      "One step of ResNet-50 with 120 images on two T4",
      640);
  figure.legend({{"forward", "forward"},
                 {"backward", "backward"},
                 {"copy", "copies (thin: waits)"},
                 {"empty", "idle"}});
  double pixels = 0, longest = 0;
  std::string details;
  for (const auto& [name, settings] :
       {std::pair("naive", settings_of("model_parallel", 120)),
        std::pair("splits of 20", settings_of("pipeline", 20))}) {
    const Report report = run(settings);
    const sim::StepView view = sim::last_step(report.timelines);
    if (longest == 0) longest = view.step_s;  // the naive one
    pixels = (figure.width() - kBegin) / longest;
    const std::string result =
        fmt::format("{}: {:.0f} ms", name, 1e3 * view.step_s);
    figure.heading(result);
    details += result + ". ";
    for (const sim::RankGroup& group : view.groups) {
      const double y = figure.add_row(25);
      figure.text(0, y + 15, fmt::format("device {}", group.ranks[0]));
      draw_lane(figure, group.timeline, "compute",
                {kBegin, y, pixels * view.step_s, 22}, pixels);
    }
  }
  figure.axis(kBegin, figure.width(), longest, {"ms", 1e-3}, "time");
  return figure.svg(details);
}

std::string sizes() {
  const model_parallel::Sweep sweep = model_parallel::run_sweep(
      on_t4s(), settings_of("pipeline", 1), {3, 5, 8, 10, 12, 20, 40, 60, 120},
      /*repeats=*/0);
  const double single = sweep.single.virtual_s;
  std::vector<Value> times;
  for (const model_parallel::StepTime& time : sweep.pipelined) {
    times.push_back({static_cast<double>(time.settings.split_size),
                     time.virtual_s / single});
  }
  // PyTorch's tutorial: 3.75 s on one GPU, 4.02 naive, 2.51 and 2.43 in splits
  const std::vector<Value> published = {{12, 2.43 / 3.75}, {20, 2.51 / 3.75}};
  Figure figure(
      "Small splits pay for kernels, large ones leave a device idle\n"
      "ResNet-50 with 120 images on two T4, over the time of one device",
      640);
  const double y = Plot::row(figure, 230);
  Plot plot(
      figure, {50, y, 470, 230},
      {"images of a split", 3, 120, {}, true, {3, 5, 8, 12, 20, 40, 60, 120}},
      {"time of a step, one device = 1", 0, 1.8});
  plot.curve({{3, 1}, {120, 1}}, kGray);
  const double naive = sweep.naive.virtual_s / single;
  plot.curve({{3, naive}, {120, naive}}, kOrange, "naive");
  plot.curve(times, kBlue, "splits");
  plot.dots(times, kBlue);
  plot.dots(published, {pictures::kInk, ""});
  const pictures::Point at = plot.at(12, 0.48);
  figure.text(at.x, at.y, "PyTorch's tutorial: 0.65 and 0.67",
              Figure::Anchor::kMiddle);
  const pictures::Point one = plot.at(3.2, 0.92);
  figure.text(one.x, one.y, "one device", Figure::Anchor::kStart,
              pictures::kMuted);
  plot.labels();
  return figure.svg("");
}

}  // namespace

std::vector<PageFigure> all() {
  return {{"chapters/04_model_parallel/turns.svg", turns},
          {"chapters/04_model_parallel/sizes.svg", sizes}};
}

}  // namespace shardbook::figures::page_04
