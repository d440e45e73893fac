#pragma once

// What the notebooks 04_model_parallel and benchmark call: runs of a ResNet on
// one device and on two, and their pictures.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "chapters/04_model_parallel/model_parallel_strategy.h"
#include "chapters/04_model_parallel/split_sweep.h"
#include "chapters/common/run/program.h"
#include "notebooks/display.h"

namespace notes {

using namespace shardbook;
using namespace shardbook::notebook;
using model_parallel::Settings;
using model_parallel::StepTime;
using model_parallel::Sweep;

/// ResNet-50 on two simulated T4, as PyTorch's tutorial has it: 120 images of
/// 128 x 128.
inline Options tutorial_options() {
  Options options;
  options.chapter = "04_model_parallel";
  options.backend = "sim";
  options.cluster = "kaggle-t4x2";
  options.world_size = 2;
  options.model = "resnet50";
  options.data = "random";
  options.optimizer = "sgd";
  options.batch = 120;
  options.image_size = 128;
  options.seq = 1;
  options.steps = 3;
  return options;
}

/// "single", "model_parallel" (in turn) or "pipeline" (in splits).
inline Settings settings_of(const std::string& variant,
                            std::int64_t split_size) {
  Settings settings;
  settings.variant = variant;
  settings.split_size = split_size;
  return settings;
}

/// Seconds of `batches` steps on one device, on two in turn, and in splits of
/// these sizes: measured `repeats` times, in virtual time without repeats.
inline Sweep sweep(const Options& options,
                   const std::vector<std::int64_t>& sizes, std::int64_t repeats,
                   std::int64_t batches) {
  return model_parallel::run_sweep(options, settings_of("pipeline", sizes[0]),
                                   sizes, repeats, batches);
}

/// The measured time with its deviation, else the virtual one.
inline Bar bar_of(const std::string& name, const StepTime& time) {
  if (time.mean_s < 0) {
    return {name, time.virtual_s, 0, fixed(time.virtual_s, 2) + " s"};
  }
  return {name, time.mean_s, time.sd_s,
          fixed(time.mean_s, 2) + " \u00b1 " + fixed(time.sd_s, 2) + " s"};
}

/// Bars of one device, two in turn, and two in splits.
inline Picture compare(const std::vector<Bar>& all) {
  double best = all[2].value;
  for (std::size_t i = 2; i < all.size(); ++i) {
    if (all[i].value < best) best = all[i].value;
  }
  return bars(
      "Two devices in turn take " + fixed(all[1].value / all[0].value, 2) +
          " of the time of one, in splits " + fixed(best / all[0].value, 2),
      all, {"s", 1});
}

inline Picture compare(const Sweep& sweep) {
  std::vector<Bar> all = {bar_of("one device", sweep.single),
                          bar_of("two, in turn", sweep.naive)};
  for (const StepTime& time : sweep.pipelined) {
    all.push_back(
        bar_of("splits of " + std::to_string(time.settings.split_size), time));
  }
  return compare(all);
}

/// The time over the size of a split.
inline Picture over_sizes(const Sweep& sweep) {
  std::vector<Bar> points;
  for (const StepTime& time : sweep.pipelined) {
    points.push_back(bar_of(std::to_string(time.settings.split_size), time));
  }
  return curve("Splits of " + std::to_string(sweep.best().settings.split_size) +
                   " are the fastest",
               points, "images of a split", bar_of("one device", sweep.single),
               bar_of("in turn", sweep.naive), {"s", 1});
}

}  // namespace notes
