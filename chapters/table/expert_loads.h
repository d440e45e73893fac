#pragma once

// The load of each expert, from the report of a run with experts, and its drawing
// in report.html.

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace shardbook::table {

struct LayerLoad {
  std::string layer;  ///< "h.3"
  /// For each expert: how often tokens chose it, relative to an even load.
  std::vector<double> shares;
};

/// From the member `expert_loads` of a run's JSON object, in its order: counts of
/// choices by layer. Empty where there is none. Throws shardbook::Error that names
/// `source` and what is wrong.
std::vector<LayerLoad> read_expert_loads(const nlohmann::ordered_json& run,
                                         const std::string& source);

/// A row of columns per layer, one for each expert; a line where the load is even.
std::string expert_loads_html(const std::vector<LayerLoad>& loads);

}  // namespace shardbook::table
