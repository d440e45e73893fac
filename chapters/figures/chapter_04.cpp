// Model parallelism: in turn, or at the same time in splits.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "bench/validate/published_table.h"
#include "chapters/figures/figures.h"
#include "chapters/pictures/lanes.h"

namespace shardbook::figures::page_04 {

Report resnet50(const std::string& options) {
  return run_once("04_model_parallel" +
                  on_shapes("kaggle-t4x2", 2, "resnet50", 120, 1) +
                  " --image-size 128" + options);
}

std::string turns() {
  Figure figure(
      "In splits, both devices work at the same time\n"
      "One step of ResNet-50 with 120 images on two T4");
  figure.legend({"forward", "backward", "optimizer: update",
                 "copy: copies activations",
                 "bubble: thin: waits for the other device",
                 "exposed: waits for gradients to arrive", "empty: idle"});
  std::optional<Lanes> lanes;  // as long as the naive step
  for (const auto& [name, options] :
       {std::pair("naive", " --variant model_parallel"),
        std::pair("splits of 20", " --split-size 20")}) {
    const Report report = resnet50(options);
    const sim::StepView view = sim::last_step(report.timelines);
    if (!lanes) lanes.emplace(figure, 70, figure.width(), view.step_s);
    figure.result(fmt::format("{}: {:.0f} ms", name, 1e3 * view.step_s));
    for (const sim::RankGroup& group : view.groups) {
      lanes->queue(fmt::format("device {}", group.ranks[0]), group.timeline,
                   "compute", view.step_s, 22);
    }
  }
  lanes->axis(kMilliseconds);
  return figure.svg();
}

// Seconds of three batches: one device, two in turn, and two in splits.
struct Time {
  double mean = 0, deviation = 0;
};
struct Experiment {
  std::vector<std::string> name;  // its lines
  double images = 120;
  Time one, naive;
  std::map<int, Time> splits;  // by their sizes

  // Of one device's time.
  double share(const Time& time) const { return time.mean / one.mean; }
};

// One of three variants per row: "single ...", "pipeline...", or another in turn.
Experiment read_experiment(const std::vector<std::string>& name, double images,
                           const char* file, const char* seconds) {
  Experiment experiment;
  experiment.name = name;
  experiment.images = images;
  const std::string root = SHARDBOOK_ROOT "/";
  for (const validate::Row& row : validate::open_table(root + file).rows) {
    const Time time = {row.number(seconds),
                       row.has("sd_s") ? row.number("sd_s") : 0};
    if (row.begins("variant", "single")) {
      experiment.one = time;
    } else if (row.begins("variant", "pipeline")) {
      experiment.splits[row.integer("split_size")] = time;
    } else {
      experiment.naive = time;
    }
  }
  return experiment;
}

Experiment published() {
  return read_experiment({"PyTorch's tutorial:", "two GPUs,", "120 images"},
                         120, "bench/validate/pytorch_mp_tutorial.csv",
                         "time_s");
}

Experiment simulated() {
  // That of PyTorch's tutorial
  const auto seconds = [](const std::string& options) {
    return Time{3 * step_s(resnet50(" --optimizer sgd" + options))};
  };
  Experiment experiment;
  experiment.name = {"Simulated:", "two T4,", "120 images"};
  experiment.one = seconds(" --variant single");
  experiment.naive = seconds(" --variant model_parallel");
  for (const int size : {1, 3, 4, 5, 6, 8, 10, 12, 15, 20, 24, 30, 40, 60}) {
    experiment.splits[size] = seconds(fmt::format(" --split-size {}", size));
  }
  return experiment;
}

Experiment measured() {
  return read_experiment({"Measured:", "two cores of a", "Xeon, 24 images"}, 24,
                         "bench/model_parallel.csv", "mean_s");
}

std::string two_devices() {
  constexpr double kNames = 236, kBegin = 244, kScale = 235, kTexts = 516,
                   kRow = 18;
  Figure figure(
      "Two devices in turn are no faster than one; in splits they are\n"
      "Share of one device's time, and seconds of three training steps of "
      "ResNet-50");
  const double top = figure.add_row(16);
  std::string details;
  const auto group = [&](const Experiment& experiment,
                         const std::vector<int>& sizes) {
    const double begin = figure.add_row(4 * kRow + 10);
    double y = begin;
    for (const std::string& line : experiment.name) {
      figure.text(0, y + 13, line);
      details += line + " ";
      y += kRow;
    }
    y = begin;
    const auto bar = [&](const std::string& name, const Time& time,
                         const Stroke& stroke) {
      const double share = experiment.share(time);
      const double end = kBegin + kScale * share;
      const double error = kScale * time.deviation / experiment.one.mean;
      const std::string seconds =
          error > 0
              ? fmt::format("{:.2f} \u00b1 {:.2f} s", time.mean, time.deviation)
              : fmt::format("{:.2f} s", time.mean);
      figure.end(kNames, y + 13, name);
      figure.box({kBegin, y + 2, kScale * share, kRow - 4}, stroke.color);
      if (error > 0) {
        const double middle = y + kRow / 2;
        figure.whiskers({end - error, middle}, {end + error, middle}, kInk);
      }
      figure.text(kTexts, y + 13, fmt::format("{:.2f}", share));
      figure.text(kTexts + 36, y + 13, seconds);
      details += fmt::format("{} {}; ", name, seconds);
      y += kRow;
    };
    bar("one device", experiment.one, kGray);
    bar("two, in turn", experiment.naive, kOrange);
    for (const int size : sizes) {
      bar(fmt::format("splits of {}", size), experiment.splits.at(size), kBlue);
    }
  };
  group(published(), {20, 12});
  group(simulated(), {20, 12});
  group(measured(), {4, 6});
  const double x = kBegin + kScale;
  figure.middle(x, top + 11, "one device = 1");
  figure.line({{x, top + 16}, {x, figure.add_row(4)}}, kInk, 1, "4 3");
  return figure.svg(details);
}

// Of one device's time, by the size of a split.
std::vector<Value> shares(const Experiment& experiment) {
  std::vector<Value> values;
  for (const auto& [size, time] : experiment.splits) {
    const double share = experiment.share(time);
    if (share < 1.8) values.push_back({1.0 * size, share});
  }
  values.push_back({experiment.images, experiment.share(experiment.naive)});
  return values;
}

std::string sizes() {
  const Experiment t4s = simulated(), xeon = measured(), tutorial = published();
  Plot plot(
      "Small splits pay for every kernel again, large ones leave a device "
      "idle\nA step of ResNet-50 on two devices, over the size of a split",
      {50, 465, 240},
      logarithmic("images of a split", 1, 120,
                  {1, 2, 3, 5, 8, 12, 20, 40, 60, 120}),
      {"time, one device = 1", 0.4, 1.7, {}, false, {0.5, 1, 1.5}});
  const double naive = t4s.share(t4s.naive);
  plot.curve({{1, naive}, {120, naive}}, kOrange,
             fmt::format("in turn: {:.2f}", naive));
  plot.curve({{1, 1}, {120, 1}}, kGray, "one device: 1");
  plot.dotted_curve(shares(t4s), kBlue);
  plot.dotted_curve(shares(xeon), kGreen);
  for (const auto& [size, time] : xeon.splits) {
    const double share = xeon.share(time);
    const double error = time.deviation / xeon.one.mean;
    plot.figure().whiskers(plot.at(size, share - error),
                           plot.at(size, share + error), kGreen.color);
  }
  plot.dots(shares(tutorial), kBlack);
  plot.text(3.9, 1.42, "two T4, simulated, 120 images", kBlue);
  plot.text(1.05, 0.62, "two cores of a Xeon, measured,", kGreen);
  plot.text(1.05, 0.55, "24 images, with deviations", kGreen);
  plot.middle(15, 0.55, "PyTorch's tutorial", kBlack);
  plot.end(114, 1.12,
           fmt::format("PyTorch, in turn: {:.2f}",
                       tutorial.naive.mean / tutorial.one.mean),
           kBlack);
  std::string details;
  for (const Experiment& each : {tutorial, t4s, xeon}) {
    details += fmt::format("{} ", fmt::join(each.name, " "));
    for (const Value& value : shares(each)) {
      details += fmt::format("{:.0f}: {:.2f}; ", value.x, value.y);
    }
  }
  return plot.svg(details);
}

// (m + 1) T_start <= T_one
std::string threshold() {
  const Experiment t4s = simulated();
  // Splits of one image take the time of starting their kernels
  const double start = t4s.splits.at(1).mean / (t4s.images + 1) / 3;
  const double one = t4s.one.mean / 3;
  const double most = one / start - 1, corner = one / start / 2;
  std::vector<Value> times = {{1, t4s.naive.mean / 3}}, fill, starts;
  for (auto split = t4s.splits.rbegin(); split != t4s.splits.rend(); ++split) {
    const double time = split->second.mean / 3;
    if (time < 1) times.push_back({t4s.images / split->first, time});
  }
  for (double m = 1; m <= 40; m *= 1.1) {
    (m < corner ? fill : starts)
        .push_back({m, m < corner ? one / 2 * (1 + 1 / m) : (m + 1) * start});
  }
  fill.push_back({corner, one / 2 * (1 + 1 / corner)});
  starts.insert(starts.begin(), fill.back());

  Plot plot(fmt::format("Up to {:.0f} splits pay: with more, starting "
                        "kernels takes longer than one device's step",
                        std::floor(most)) +
                "\nA step of ResNet-50 with 120 images on two T4, simulated",
            {50, 480, 250},
            logarithmic("splits m", 1, 40, {1, 2, 3, 4, 6, 8, 12, 24, 40}),
            {"time of a step", 0, 1, kMilliseconds});
  plot.mark(most, kOrange, "");
  plot.curve({{1, one}, {40, one}}, kGray, "one device");
  plot.curve(fill, kGreen);
  plot.curve(starts, kOrange);
  plot.dotted_curve(times, kBlue);
  plot.dots({fill.back()}, kGreen);
  plot.end(most / 1.02, 0.93, fmt::format("inequality: {:.1f}", most), kOrange);
  plot.middle(5, 0.45, "simulated: best with 6", kBlue);
  plot.middle(2.5, 0.28, "computing: (m + 1)/2m of one device", kGreen);
  plot.middle(corner, 0.22, fmt::format("best in theory: {:.0f}", corner),
              kGreen);
  plot.middle(9, 0.12,
              fmt::format("starting kernels: (m + 1) {:.2f} ms", 1e3 * start),
              kOrange);
  std::string details = fmt::format(
      "One device takes {:.0f} ms. Simulated, by the number of splits: ",
      1e3 * one);
  for (const Value& time : times) {
    details += fmt::format("{:.0f}: {:.0f} ms; ", time.x, 1e3 * time.y);
  }
  return plot.svg(details);
}

std::vector<PageFigure> all() {
  return {{"chapters/04_model_parallel/two_devices.svg", two_devices},
          {"chapters/04_model_parallel/turns.svg", turns},
          {"chapters/04_model_parallel/sizes.svg", sizes},
          {"chapters/04_model_parallel/threshold.svg", threshold}};
}

}  // namespace shardbook::figures::page_04
