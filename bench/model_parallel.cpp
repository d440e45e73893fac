// ./shardbook bench model-parallel: the experiment of PyTorch's tutorial.
//
// A ResNet on one device, on two in turn, and on two in splits; then other sizes
// of splits. A repetition trains a few batches; the table and the two charts
// have the mean of ten, and the deviation.

#include <fmt/format.h>

#include <algorithm>

#include "chapters/04_model_parallel/split_sweep.h"
#include "chapters/common/run/command_line.h"
#include "chapters/common/run/exit_status.h"
#include "chapters/pictures/plot.h"
#include "core/text_file.h"

using namespace shardbook;
using namespace shardbook::model_parallel;

namespace {

/// The wall time, or the virtual time where nothing was measured.
pictures::Bar bar_of(const std::string& name, const StepTime& time) {
  if (time.mean_s < 0) {
    return {name, time.virtual_s, 0, fmt::format("{:.3f} s", time.virtual_s)};
  }
  return {name, time.mean_s, time.sd_s,
          fmt::format("{:.2f} \u00b1 {:.2f} s", time.mean_s, time.sd_s)};
}

pictures::Bar bar_of(const StepTime& splits) {
  return bar_of(std::to_string(splits.settings.split_size), splits);
}

/// One device, two in turn, and two in splits of --split-size.
pictures::Picture variants(const Sweep& sweep, const std::string& what,
                           std::int64_t split_size) {
  const auto found =
      std::ranges::find_if(sweep.pipelined, [&](const StepTime& time) {
        return time.settings.split_size == split_size;
      });
  const StepTime& splits =
      found == sweep.pipelined.end() ? sweep.best() : *found;
  const pictures::Bar one = bar_of("one device", sweep.single),
                      naive = bar_of("model parallel", sweep.naive),
                      pipelined =
                          bar_of("splits of " +
                                     std::to_string(splits.settings.split_size),
                                 splits);
  return pictures::bars(
      fmt::format("Two devices in turn take {:.2f} of one's time, in splits "
                  "{:.2f}\nSeconds of {}",
                  naive.value / one.value, pipelined.value / one.value, what),
      {one, naive, pipelined}, {"s", 1});
}

/// Sizes whose time would flatten the others are named below the title.
pictures::Picture split_sizes_chart(const Sweep& sweep,
                                    const std::string& what) {
  const pictures::Bar one = bar_of("one device", sweep.single),
                      naive = bar_of("model parallel", sweep.naive),
                      best = bar_of(sweep.best());
  std::vector<pictures::Bar> points;
  std::string slow;
  for (const StepTime& time : sweep.pipelined) {
    const pictures::Bar point = bar_of(time);
    if (point.value < 2 * naive.value) {
      points.push_back(point);
    } else {
      slow += fmt::format("; splits of {}: {}", point.name, point.text);
    }
  }
  return pictures::curve(
      fmt::format("Splits of {} are the fastest: {}, on one device {}\n"
                  "Seconds of {}{}",
                  best.name, best.text, one.text, what, slow),
      points, "rows of a split", one, naive, {"s", 1});
}

void write(const std::string& path, const std::string& svg) {
  write_text_file(path, svg, "--charts: " + path);
  fmt::print("{}\n", path);
}

}  // namespace

int main(int argc, char** argv) {
  return chapter_main([&] {
    Options options = default_options();
    Settings settings;
    Extras extras;
    std::int64_t batches = 3;
    std::string charts;
    CommandLine line("model_parallel",
                     "The experiment of PyTorch's tutorial: a ResNet on one "
                     "device and on two.");
    add_shared_options(line, options, {"threads", "sim"},
                       "one process works on both devices");
    add_options(line, settings, extras);
    line.add("--batches", &batches, "training steps of a repetition", 1);
    line.add("--charts", &charts,
             "write PREFIX-variants.svg and PREFIX-splits.svg");
    line.parse(argc, argv);
    check_options(options);
    check_settings(options, settings);
    const Sweep sweep = run_sweep(options, settings, split_sizes(extras.sweep),
                                  extras.repeats, batches);
    const std::string what = fmt::format(
        "{} batch{} of {} images of {} x {}, {}", batches,
        batches == 1 ? "" : "es", options.batch, options.image_size,
        options.image_size,
        sweep.repeats > 0 ? "measured" : "simulated on " + sweep.cluster);
    fmt::print("{}: {}\n{}", options.model, what, sweep_text(sweep));
    if (charts.empty()) return 0;
    write(charts + "-variants.svg",
          variants(sweep, what, settings.split_size).svg);
    write(charts + "-splits.svg", split_sizes_chart(sweep, what).svg);
    return 0;
  });
}
