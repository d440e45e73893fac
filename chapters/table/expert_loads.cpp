#include "chapters/table/expert_loads.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>

#include "chapters/pictures/svg.h"
#include "chapters/table/internal/json_reader.h"
#include "core/check.h"

namespace shardbook::table {
namespace {

namespace svg = pictures::svg;

using internal::Json;
using internal::JsonReader;

/// Twice the even load is as high as a row.
constexpr double kMostShown = 2;

std::string layer_html(const LayerLoad& load) {
  std::vector<double> heights;
  std::vector<std::string> names;
  std::size_t busiest = 0;
  for (std::size_t e = 0; e < load.shares.size(); ++e) {
    heights.push_back(load.shares[e] / kMostShown);
    names.push_back(fmt::format("expert {}: {:.2f}", e, load.shares[e]));
    if (load.shares[e] > load.shares[busiest]) busiest = e;
  }
  const std::string most =
      fmt::format("expert {}: {:.2f}", busiest, load.shares[busiest]);
  return fmt::format(
      "<span class=\"label\">{}</span>{}<span class=\"number\">{}</span>\n",
      svg::escape(load.layer),
      svg::columns(heights, names, 1 / kMostShown,
                   load.layer + ", load of " +
                       std::to_string(load.shares.size()) +
                       " experts; the busiest is " + most),
      most);
}

}  // namespace

std::vector<LayerLoad> read_expert_loads(const nlohmann::ordered_json& run,
                                         const std::string& source) {
  const JsonReader reader(run, source);
  std::vector<LayerLoad> loads;
  if (!reader.object("expert_loads")) return loads;
  for (const auto& [layer, counts] : reader.at("expert_loads").items()) {
    const std::string where = source + ": expert_loads." + layer;
    LayerLoad load{layer, {}};
    SB_CHECK(counts.is_array() && !counts.empty(), where,
             " has to be a list with a count for each expert");
    for (const Json& count : counts) {
      SB_CHECK(count.is_number() && count.get<double>() >= 0, where,
               ": a count has to be a number from 0 on");
      load.shares.push_back(count.get<double>());
    }
    const double even =
        std::accumulate(load.shares.begin(), load.shares.end(), 0.0) /
        static_cast<double>(load.shares.size());
    for (double& share : load.shares) share /= std::max(even, 1e-300);
    loads.push_back(std::move(load));
  }
  return loads;
}

std::string expert_loads_html(const std::vector<LayerLoad>& loads) {
  if (loads.empty()) return "";
  std::string text =
      "<figure class=\"loads\"><figcaption><b>Load of each expert</b> how "
      "often tokens chose it, relative to an even load (dashed line); at the "
      "right the busiest</figcaption>\n<div class=\"bars wide\">";
  for (const LayerLoad& load : loads) text += layer_html(load);
  return text + "</div></figure>\n";
}

}  // namespace shardbook::table
