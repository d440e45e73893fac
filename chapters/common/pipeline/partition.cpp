#include "chapters/common/pipeline/partition.h"

#include <algorithm>
#include <numeric>
#include <regex>

#include "chapters/common/run/worlds.h"
#include "core/check.h"

namespace shardbook {
namespace {

/// 1 for each layer whose type matches, 0 for the others.
std::vector<double> layers_of_type(const std::string& partition,
                                   const LayerList& layers, int num_stages) {
  std::vector<double> matches;
  InitOptions on_meta;
  on_meta.device = Device::meta();
  try {
    const std::regex type(partition.substr(5),
                          std::regex::ECMAScript | std::regex::icase);
    for (int i = 0; i < layers.size(); ++i) {
      const std::string name = layers.make(i, on_meta)->type_name();
      matches.push_back(std::regex_search(name, type) ? 1 : 0);
    }
  } catch (const std::regex_error&) {
    SB_FAIL("--partition ", partition, ": not a regular expression");
  }
  const auto count = std::count(matches.begin(), matches.end(), 1);
  SB_CHECK(count >= num_stages, "--partition ", partition, ": matches ", count,
           " layers for ", num_stages, " stages; each needs one");
  return matches;
}

std::vector<double> layer_seconds_on_cluster(const Options& options,
                                             const LayerList& layers,
                                             const Tensors& inputs) {
  const auto model = cost_model(options);
  SB_CHECK(model != nullptr,
           "--partition time: needs a --cluster other than none");
  return layer_seconds(
      layers, inputs, options.dtype,
      [&](const OpEvent& event) { return model->operation(event).seconds; });
}

/// The layers of a list such as 2,2,1.
std::string even_list(int num_layers, int num_stages) {
  const std::vector<int> cuts = cut_uniform(num_layers, num_stages);
  std::string text;
  for (std::size_t s = 1; s < cuts.size(); ++s) {
    text += (s > 1 ? "," : "") + std::to_string(cuts[s] - cuts[s - 1]);
  }
  return text;
}

/// What counts as a layer.
std::string parts_of(const Options& options) {
  const ModelConfig config = ModelConfig::read(options.model);
  if (config.type == "mlp") return "its embedding and three linear layers";
  return config.is_image() ? "its stem, its blocks and its head"
                           : "its embedding, its blocks and its head";
}

}  // namespace

const char* const kPartitionHelp =
    "where to cut: uniform, parameters, time, type:REGEX, or the layers of "
    "each stage (2,1,3)";

std::vector<int> cuts_of(const Options& options, const std::string& partition,
                         const LayerList& layers, int num_stages,
                         const std::function<Tensors()>& inputs) {
  if (partition == "uniform") return cut_uniform(layers.size(), num_stages);
  if (partition == "parameters") {
    return cut_by_cost(layer_parameters(layers), num_stages);
  }
  if (partition == "time") {
    return cut_by_cost(layer_seconds_on_cluster(options, layers, inputs()),
                       num_stages);
  }
  if (partition.rfind("type:", 0) == 0) {
    return cut_by_cost(layers_of_type(partition, layers, num_stages),
                       num_stages);
  }
  const std::vector<int> counts = read_counts(
      "--partition", partition,
      "give uniform, parameters, time, type:REGEX, or the layers of "
      "each stage (2,1,3)");
  const std::string example =
      "; give a list such as " + even_list(layers.size(), num_stages);
  SB_CHECK(static_cast<int>(counts.size()) == num_stages, "--partition ",
           partition, ": ", counts.size(), " stages; there are ", num_stages,
           example);
  // Each is below 10^9
  const std::int64_t sum =
      std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  SB_CHECK(sum == layers.size(), "--partition ", partition, ": adds up to ",
           sum, " layers; ", options.model, " has ", layers.size(), ", ",
           parts_of(options), example);
  return cut_by_balance(layers.size(), counts);
}

}  // namespace shardbook
