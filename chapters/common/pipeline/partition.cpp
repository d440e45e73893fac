#include "chapters/common/pipeline/partition.h"

#include <algorithm>
#include <numeric>
#include <regex>

#include "chapters/common/run/option_values.h"
#include "chapters/common/run/worlds.h"
#include "core/autograd.h"
#include "core/check.h"
#include "core/context.h"
#include "core/how_many.h"

namespace shardbook {
namespace {

// Adds up the cost of operations.
class Prices : public Observer {
 public:
  explicit Prices(const std::function<double(const OpEvent&)>& seconds_of)
      : seconds_of_(seconds_of) {}
  void on_op_begin(const OpEvent& event) override {
    sum_s_ += seconds_of_(event);
  }
  double sum_s() const { return sum_s_; }

 private:
  const std::function<double(const OpEvent&)>& seconds_of_;
  double sum_s_ = 0;
};

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
  SB_CHECK(count >= num_stages, "--partition ", partition, ": matches ",
           how_many(count, "layer"), " for ", how_many(num_stages, "stage"),
           "; each needs one");
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

}  // namespace

std::string layers_text(const Options& options, int num_layers) {
  const ModelConfig config = model_config(options);
  return how_many(num_layers, "layer") + ": " +
         (config.type == "mlp"
              ? "embedding and three linear layers"
              : (config.is_image() ? "stem, " : "embedding, ") +
                    how_many(num_layers - 2, "block") + " and head");
}

// --- Cuts --------------------------------------------------------------------

std::vector<int> cut_uniform(int num_layers, int num_stages) {
  SB_CHECK(num_stages >= 1 && num_stages <= num_layers,
           how_many(num_stages, "stage"), ": the model has ",
           how_many(num_layers, "layer"), "; give at most one stage per layer");
  std::vector<int> cuts = {0};
  for (int s = 0; s < num_stages; ++s) {
    const int extra = s < num_layers % num_stages ? 1 : 0;
    cuts.push_back(cuts.back() + num_layers / num_stages + extra);
  }
  return cuts;
}

std::vector<int> cut_by_balance(int num_layers,
                                const std::vector<int>& balance) {
  std::vector<int> cuts = {0};
  for (const int count : balance) {
    SB_CHECK(count >= 1, "balance: ", how_many(count, "layer"),
             " in a stage; give at least one");
    cuts.push_back(cuts.back() + count);
  }
  SB_CHECK(cuts.back() == num_layers, "balance: adds up to ",
           how_many(cuts.back(), "layer"), ", the model has ", num_layers);
  return cuts;
}

std::vector<int> cut_by_cost(const std::vector<double>& costs, int num_stages) {
  const int n = static_cast<int>(costs.size());
  SB_CHECK(num_stages >= 1 && num_stages <= n, how_many(num_stages, "stage"),
           ": the model has ", how_many(n, "layer"),
           "; give at most one stage per layer");
  std::vector<double> before(costs.size() + 1, 0);
  std::partial_sum(costs.begin(), costs.end(), before.begin() + 1);
  // worst[s][i]: the costliest stage when layers 0 .. i-1 make s stages
  const std::size_t end = costs.size();
  const auto p = static_cast<std::size_t>(num_stages);
  std::vector<std::vector<double>> worst(p + 1,
                                         std::vector<double>(end + 1, 1e300));
  std::vector<std::vector<std::size_t>> last(
      p + 1, std::vector<std::size_t>(end + 1, 0));
  worst[0][0] = 0;
  for (std::size_t s = 1; s <= p; ++s) {
    for (std::size_t i = s; i <= end; ++i) {
      for (std::size_t cut = s - 1; cut < i; ++cut) {
        const double here = before[i] - before[cut];
        const double cost = std::max(worst[s - 1][cut], here);
        if (cost < worst[s][i]) {
          worst[s][i] = cost;
          last[s][i] = cut;
        }
      }
    }
  }
  std::vector<int> cuts = {n};
  std::size_t cut = end;
  for (std::size_t s = p; s >= 1; --s) {
    cut = last[s][cut];
    cuts.push_back(static_cast<int>(cut));
  }
  std::reverse(cuts.begin(), cuts.end());
  return cuts;
}

std::vector<double> layer_parameters(const LayerList& layers) {
  std::vector<double> counts;
  for (int i = 0; i < layers.size(); ++i) {
    double count = 0;
    for (const NamedTensor& each : layer_parameters_on_shapes(layers, i)) {
      count += static_cast<double>(each.tensor.numel());
    }
    counts.push_back(count);
  }
  return counts;
}

std::vector<double> layer_seconds(
    const LayerList& layers, const Tensors& inputs, DType dtype,
    const std::function<double(const OpEvent&)>& seconds_of) {
  const std::vector<LayerInput> specs = trace_shapes(layers, inputs, dtype);
  RankContext context(Device::meta());
  const RankContext::Scope scope(context);
  InitOptions init;
  init.dtype = dtype;
  std::vector<double> seconds;
  for (int i = 0; i < layers.size(); ++i) {
    const LayerInput& spec = specs[static_cast<std::size_t>(i)];
    Stage layer(layers.on_shapes(), i, i + 1, init);
    Tensors values;
    const auto add = [&](const ValueSpec& value) {
      values.push_back(Tensor::empty(value.shape, {value.dtype, Device()}));
      if (value.needs_grad) values.back().set_requires_grad();
    };
    for (const ValueSpec& value : spec.values) add(value);
    for (const std::string& name : layer.incoming()) add(spec.skips.at(name));
    const auto prices = std::make_shared<Prices>(seconds_of);
    context.add_observer(prices);
    Tensors roots, grads;
    for (const Tensor& output : layer(values)) {
      if (!output.requires_grad()) continue;
      roots.push_back(output);
      grads.push_back(output.empty_like());
    }
    if (!roots.empty()) autograd::backward(roots, grads);
    context.remove_observer(prices);
    seconds.push_back(prices->sum_s());
  }
  return seconds;
}

// --- Options -----------------------------------------------------------------

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
           partition, ": ", how_many(counts.size(), "stage"), "; there are ",
           num_stages, example);
  // Each is below 10^9
  const std::int64_t sum =
      std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  SB_CHECK(sum == layers.size(), "--partition ", partition, ": adds up to ",
           how_many(sum, "layer"), "; ", options.model, " has ",
           layers_text(options, layers.size()), example);
  return cut_by_balance(layers.size(), counts);
}

void add_recompute(CommandLine& line, std::string& mode, bool& is_early) {
  line.add_mode({"--recompute", may_differ::kPlace}, &mode,
                "which micro-batches keep only their stage's input, and run "
                "forward again before their backward; except_last: not those "
                "whose backward is next",
                {"always", "except_last", "never"});
  line.add({"--early-recompute", may_differ::kPlace}, &is_early,
           "run forward again before the gradient arrives");
}

}  // namespace shardbook
