#include "chapters/13_moe/load.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <numeric>

#include "chapters/pictures/plot.h"

namespace shardbook::moe {
namespace {

/// "transformer.h.3.mlp" -> "h.3"; "model.layers.3.mlp" -> "layers.3"
std::string short_name(const std::string& layer) {
  const std::size_t begin = layer.find('.') + 1, end = layer.rfind('.');
  return layer.ends_with(".mlp") ? layer.substr(begin, end - begin) : layer;
}

/// "h.10" comes after "h.9".
std::vector<std::string> in_order(const Loads& loads) {
  std::vector<std::string> names;
  for (const auto& [name, counts] : loads) names.push_back(name);
  std::stable_sort(names.begin(), names.end(),
                   [](auto& a, auto& b) { return a.size() < b.size(); });
  return names;
}

}  // namespace

std::vector<double> load_shares(const std::vector<std::int64_t>& counts) {
  const auto total = static_cast<double>(
      std::accumulate(counts.begin(), counts.end(), std::int64_t{0}));
  std::vector<double> result;
  for (const std::int64_t each : counts) {
    result.push_back(total == 0
                         ? 0
                         : static_cast<double>(each) *
                               static_cast<double>(counts.size()) / total);
  }
  return result;
}

Loads sum_loads(const MoeRecord& record, ProcessGroup& world, bool counts) {
  Loads own, loads;
  for (const auto& [name, load] : record.loads) {
    if (counts && !load.exp_counts.empty()) own[name] = load.exp_counts;
  }
  for (const std::string& text : world.exchange(nlohmann::json(own).dump())) {
    for (const auto& [name, more] : nlohmann::json::parse(text).get<Loads>()) {
      std::vector<std::int64_t>& sums = loads[name];
      sums.resize(more.size());
      std::transform(more.begin(), more.end(), sums.begin(), sums.begin(),
                     std::plus<>());
    }
  }
  return loads;
}

std::string loads_json(const Loads& loads) {
  std::string text;
  for (const std::string& name : in_order(loads)) {
    text += fmt::format("{}\"{}\": [{}]", text.empty() ? "" : ", ",
                        short_name(name), fmt::join(loads.at(name), ", "));
  }
  return "{" + text + "}";
}

std::string draw_loads(const Loads& loads) {
  if (loads.empty()) return "";
  std::string text = "load of each expert (1.00: even)\n";
  for (const std::string& name : in_order(loads)) {
    std::string numbers = fmt::format("{:>6} ", short_name(name));
    std::string bars(numbers.size(), ' ');
    for (const double share : load_shares(loads.at(name))) {
      numbers += fmt::format(" {:5.2f}", share);
      const auto length = std::clamp(static_cast<int>(share * 2.5 + 0.5), 0, 5);
      bars += " " + std::string(static_cast<std::size_t>(5 - length), ' ') +
              std::string(static_cast<std::size_t>(length), '#');
    }
    bars.erase(bars.find_last_not_of(' ') + 1);
    text += numbers + "\n" + bars + "\n";
  }
  return text;
}

pictures::Picture loads_picture(const std::string& title, const Loads& loads) {
  std::vector<pictures::Series> rows;
  for (const std::string& name : in_order(loads)) {
    rows.push_back({short_name(name), load_shares(loads.at(name))});
  }
  pictures::Picture picture =
      pictures::columns(title, rows, "expert", /*even=*/1);
  picture.text = draw_loads(loads);
  return picture;
}

}  // namespace shardbook::moe
