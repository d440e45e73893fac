#pragma once

// The load of each expert, as text, as a picture and as data for report.html.

#include <map>
#include <string>
#include <vector>

#include "chapters/13_moe/moe_layer.h"
#include "chapters/pictures/figure.h"

namespace shardbook::moe {

/// Choices per expert, by layer.
using Loads = std::map<std::string, std::vector<std::int64_t>>;

/// Sums over the ranks where `counts` is true; not in the ledger. Collective.
Loads sum_loads(const MoeRecord& record, ProcessGroup& world, bool counts);

/// Loads relative to an even one.
std::vector<double> load_shares(const std::vector<std::int64_t>& counts);
/// Choices per expert by layer, as a JSON object; for report.html.
std::string loads_json(const Loads& loads);
/// A row per layer, a cell per expert: its share of the load, where 1.00 is
/// even, and a bar below.
std::string draw_loads(const Loads& loads);
/// The same with bars side by side, one row per layer.
pictures::Picture loads_picture(const std::string& title, const Loads& loads);

}  // namespace shardbook::moe
