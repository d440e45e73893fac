#pragma once

// The experiment of this chapter: how the time of a step depends on the size
// of a split.
//
// Small splits overlap more: n_s of them take (n_s + 1) / (2 n_s) of the naive
// time. But each kernel then computes less, and the cost of starting it is paid
// n_s times. The best split size lies in between.

#include <cstdint>
#include <string>
#include <vector>

#include "chapters/04_model_parallel/model_parallel_strategy.h"

namespace shardbook::model_parallel {

/// Seconds of a repetition of a variant: of one training step, or of several.
struct StepTime {
  Settings settings;
  /// Wall time on this machine, with half of the cores per device: mean and
  /// standard deviation over the repeats. Negative when not measured.
  double mean_s = -1;
  double sd_s = 0;
  double fastest_s = -1;
  /// Virtual time on --cluster; negative without a cluster.
  double virtual_s = -1;
};

/// Fills in the wall times from the seconds of a variant's steps. The first
/// step warms up and does not count. The deviation is the sample's (n - 1).
void set_wall_times(const std::vector<double>& seconds, StepTime& time);

struct Sweep {
  std::int64_t repeats = 0;
  std::int64_t batches = 1;  ///< training steps of a repetition
  std::string cluster;
  StepTime single, naive;
  std::vector<StepTime> pipelined;  ///< by split size

  /// The split size with the least mean (or, unmeasured, virtual) time.
  const StepTime& best() const;
};

/// "1,3,5": numbers from 1 up. Throws Error that names the option otherwise.
std::vector<std::int64_t> split_sizes(const std::string& text);

/// Runs one device, the naive schedule and each split size: a round to warm up,
/// then `repeats` rounds of `batches` steps of each, so that other load on the
/// machine affects all variants alike. `sim` gives virtual times only.
Sweep run_sweep(const Options& options, const Settings& settings,
                const std::vector<std::int64_t>& sizes, std::int64_t repeats,
                std::int64_t batches = 1);

/// A table, one line per variant.
std::string sweep_text(const Sweep& sweep);
/// The sweep as a JSON object; report.html draws it.
std::string sweep_json(const Sweep& sweep);
/// Runs the sweep of --sweep, if it is given, and adds it to the report.
void add_sweep(const Options& options, const Settings& settings,
               const Extras& extras, Report& report);

}  // namespace shardbook::model_parallel
