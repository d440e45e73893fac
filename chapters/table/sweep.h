#pragma once

// A sweep over split sizes, from the report of the chapter on model
// parallelism, and its drawing in report.html.

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

namespace shardbook::table {

/// Seconds of one training step; negative where it was not measured.
struct SweepTime {
  std::int64_t split_size = 0;  ///< 0: not in splits
  double wall_s = -1;           ///< mean
  double wall_sd_s = 0;
  double virtual_s = -1;
};

struct Sweep {
  std::int64_t repeats = 0;
  std::string cluster;
  SweepTime single, naive;
  std::vector<SweepTime> pipelined;
};

/// From the member `sweep` of a run's JSON object; nothing where there is none.
/// Throws shardbook::Error that names `source` and what is wrong.
std::optional<Sweep> read_sweep(const nlohmann::ordered_json& run,
                                const std::string& source);

/// Draws the times of one device, the naive schedule and the best split size as
/// bars with their deviations, and a curve over the split sizes: once in wall
/// time and once in virtual time.
std::string sweep_html(const Sweep& sweep);

}  // namespace shardbook::table
