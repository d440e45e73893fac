#pragma once

// What the notebook 00_single_device calls: runs, and the numbers in them.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "chapters/00_single_device/single_device.h"
#include "chapters/programs/programs.h"
#include "core/how_many.h"
#include "notebooks/lessons.h"

namespace notes {

using namespace shardbook::notebook;

inline const std::string kSmall =
    "00_single_device --batch 24 --steps 6" + kNano;

/// Two steps of a published model on shapes, on a simulated A100.
inline std::string on_shapes(const std::string& model, std::int64_t batch,
                             std::int64_t seq) {
  return joined("00_single_device --steps 2", kA100s, " --model ", model,
                " --batch ", batch, " --seq ", seq);
}

/// The most bytes of all kinds at one time, in the last step on shapes.
inline double peak(const Report& report) {
  std::int64_t most = 0;
  for (const sim::MemorySample& sample : report.timelines[0].memory) {
    most = std::max(most, sample.total());
  }
  return static_cast<double>(most);
}

/// Peaks of steps of 1, 2, 3, ... samples. The lines across are the last step's
/// peak with recomputation, and parameters with their moments.
inline Picture peaks(const std::string& title, const std::string& model,
                     std::int64_t seq, std::int64_t most_samples) {
  std::vector<Bar> plain;
  for (std::int64_t samples = 1; samples <= most_samples; ++samples) {
    plain.push_back(
        {std::to_string(samples), peak(run(on_shapes(model, samples, seq)))});
  }
  const Report again =
      run(on_shapes(model, most_samples, seq) + " --recompute");
  const Report one = run(on_shapes(model, 1, seq));
  return curve(
      title, plain, "samples", {"recomputed", peak(again)},
      {"12 bytes per parameter", 3 * peak_of(one, MemoryKind::kParameter)},
      {"GiB", 1 << 30});
}

/// Each number of micro-batches, first without and then with recomputation.
inline std::vector<Bar> activation_bars(
    const std::vector<std::int64_t>& pieces) {
  std::vector<Bar> all;
  for (const bool recompute : {false, true}) {
    for (const std::int64_t each : pieces) {
      all.push_back(activation_bar(
          how_many(each, "micro-batch") + (recompute ? ", recomputed" : ""),
          run(joined(kSmall, " --micro-batches ", each,
                     recompute ? " --recompute" : ""))));
    }
  }
  return all;
}

/// The share of one matrix's weights that bf16 steps at this rate change.
inline Bar changed_bar(double rate, bool master_weights) {
  const Options options = options_of(
      joined(kSmall, " --dtype bf16 --batch 2 --seq 16 --lr ", rate));
  single_device::SingleDeviceOptions setup;
  setup.master_weights = master_weights;
  single_device::SingleDevice strategy(options, setup);
  const auto matrix = [&] {
    return strategy.model().model->named_parameters()[6].tensor;
  };
  const std::vector<double> before = matrix().to_vector<double>();
  for (int step = 0; step < options.steps; ++step) strategy.step(step);
  const std::vector<double> after = matrix().to_vector<double>();
  double changed = 0;
  for (std::size_t i = 0; i < before.size(); ++i) {
    changed += before[i] != after[i];
  }
  const double share = changed / static_cast<double>(before.size());
  return {master_weights ? "with f32 masters" : "bf16 alone", share, 0,
          percent(share, 0)};
}

}  // namespace notes
