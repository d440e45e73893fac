// A model that is planned in the place of another one.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "chapters/common/models/counted_model.h"
#include "chapters/common/models/models.h"
#include "chapters/planner/plan.h"
#include "core/check.h"
#include "core/how_many.h"

namespace shardbook::planner {
namespace {

constexpr double kMostDifference = 0.03;  // of the whole
constexpr char kCountIt[] =
    "; give --model alone, without --nodes, --world-size and --batch, to count "
    "it";

bool has_window(const CountedModel& model, std::int64_t seq) {
  return std::any_of(model.rows.begin(), model.rows.end(),
                     [=](const CountedPart& row) {
                       return row.part.window > 0 && row.part.window < seq;
                     });
}

const BlockPart& first_of(const CountedModel& model, const char* group,
                          PartKind kind) {
  const auto row = std::find_if(
      model.rows.begin(), model.rows.end(), [&](const CountedPart& each) {
        // An indexer is not the attention of its block
        return each.group == group && each.part.kind == kind &&
               !each.is_detached;
      });
  SB_CHECK(row != model.rows.end(), "a ", model.type, " has no ", group);
  return row->part;
}

/// The width of gated MLPs with the weights of this group, in `blocks` blocks with
/// so many experts. Where it is no integer, tensor parallelism can cut it.
std::int64_t gated_width(const CountedModel& model, const std::string& group,
                         double hidden, double blocks, double experts) {
  double weights = 0;
  for (const CountedPart& row : model.rows) {
    if (row.group != group) continue;
    weights += row.times * static_cast<double>(row.part.experts) *
               static_cast<double>(row.part.in * row.part.out);
  }
  constexpr double kPiece = 64;
  const double width = weights / (3 * hidden * blocks * experts);
  const bool is_whole = width == std::floor(width);
  return std::llround(is_whole ? width : kPiece * std::round(width / kPiece));
}

/// A Llama, or a Mixtral, of the model's sizes.
ModelConfig like(const CountedModel& model) {
  const BlockPart& table = first_of(model, "embedding", PartKind::kTable);
  const BlockPart& attention =
      first_of(model, "attention", PartKind::kAttention);
  const auto hidden = first_of(model, "attention", PartKind::kProduct).in;
  double blocks = 0;
  const BlockPart* experts = nullptr;
  bool is_tied = false;
  for (const CountedPart& row : model.rows) {
    if (row.part.kind == PartKind::kAttention && !row.is_detached) {
      blocks += row.times;
    }
    if (row.group == "experts") experts = &row.part;
    is_tied = is_tied || row.is_tied;
  }
  const auto h = static_cast<double>(hidden);
  nlohmann::json config = {
      // A Llama's heads divide the hidden size, also where they have a width
      {"model_type", hidden % attention.heads == 0 ? "llama" : "mistral"},
      {"vocab_size", table.in},
      {"hidden_size", hidden},
      {"num_hidden_layers", static_cast<std::int64_t>(blocks)},
      {"num_attention_heads", attention.heads},
      {"num_key_value_heads", attention.columns[1].parts},
      {"head_dim", attention.columns[0].width / attention.heads},
      {"max_position_embeddings", model.positions},
      {"tie_word_embeddings", is_tied}};
  if (experts != nullptr) {
    config["model_type"] = "mixtral";
    config["num_local_experts"] = experts->experts;
    config["num_experts_per_tok"] = experts->chosen;
    config["intermediate_size"] = gated_width(
        model, "experts", h, blocks, static_cast<double>(experts->experts));
  } else {
    config["intermediate_size"] = gated_width(model, "mlp", h, blocks, 1);
  }
  return ModelConfig::from_json(config.dump(), "--model");
}

std::string percent(double share) {
  // Without a -0.00
  return fmt::format("{:+.2f} %", std::round(1e4 * share) / 1e2 + 0.0);
}

/// By group, the parameters that act on a token.
std::map<std::string, double> active_parts(const CountedModel& model) {
  std::map<std::string, double> sums;
  for (const CountedPart& row : model.rows) {
    if (row.is_tied) continue;
    sums[row.group] += row.times * row.part.parameters() *
                       static_cast<double>(row.part.chosen) /
                       static_cast<double>(row.part.experts);
  }
  return sums;
}

/// "shared experts: 0.45 billion active parameters here, 0.00 there"
std::string largest_difference(const CountedModel& here,
                               const CountedModel& there) {
  std::map<std::string, double> own = active_parts(here);
  std::map<std::string, double> other = active_parts(there);
  for (const auto& [group, count] : other) own[group];  // of both
  const auto difference = [&](const auto& part) {
    return std::abs(part.second - other[part.first]);
  };
  const auto most = std::max_element(own.begin(), own.end(),
                                     [&](const auto& a, const auto& b) {
                                       return difference(a) < difference(b);
                                     });
  std::string name = most->first;
  std::replace(name.begin(), name.end(), '_', ' ');
  if (here.has_latent() && name == "attention") name = "latent attention";
  return fmt::format("{}: {:.2f} billion active parameters here, {:.2f} there",
                     name, most->second / 1e9, other[most->first] / 1e9);
}

}  // namespace

StandIn stand_in_of(const std::string& name_or_file, std::int64_t seq) {
  bool trains = true;
  try {
    const ModelConfig config = ModelConfig::read(name_or_file);
    const std::int64_t window = config.llama.sliding_window;
    if (window == 0 || seq <= window) return {};
  } catch (const Error&) {
    trains = false;
  }
  const CountedModel model = CountedModel::read(name_or_file);
  SB_CHECK(seq <= model.positions, "--seq ", seq, ": ", name_or_file, " has ",
           how_many(model.positions, "position"), "; give 1 to ",
           model.positions);
  if (seq == 0) seq = model.positions;

  StandIn result = {nullptr, model.remarks};
  if (trains) {
    result.remarks.push_back(fmt::format(
        "training refuses samples of {}, more than its windows have",
        how_many(seq, "token")));
  }
  ModelConfig config = model.trained   ? *model.trained
                       : model.nearest ? *model.nearest
                                       : like(model);
  config.llama.sliding_window = 0;
  config.llama.sliding_blocks.clear();
  result.config = std::make_shared<const ModelConfig>(config);

  const CountedModel planned = CountedModel::of(config);
  const auto tokens = static_cast<double>(seq);
  const auto more = [](double there, double here) { return there / here - 1; };
  const double parameters = more(planned.parameters(), model.parameters());
  const double operations = more(planned.operations(tokens, Mask::kIgnored),
                                 model.operations(tokens, Mask::kIgnored));
  const std::string differences =
      fmt::format("parameters {}, operations per token {}", percent(parameters),
                  percent(operations));
  const std::string as =
      config.is_planned ? "by the table of a block" : "as a " + config.type;
  SB_CHECK(
      std::max(std::abs(parameters), std::abs(operations)) <= kMostDifference,
      "--model: the book does not train a ", model.type,
      ", nor can it be planned ", as, ", which differs: ", differences,
      "; most in ", largest_difference(model, planned), kCountIt);
  const bool has_all = config.is_planned && parameters == 0 && operations == 0;
  result.remarks.push_back(has_all ? "it is planned with all its parts"
                                   : "it is planned " + as +
                                         " with the same matrices (" +
                                         differences + ")");
  if (has_window(model, seq)) {
    const double masked = more(planned.operations(tokens, Mask::kCounted),
                               model.operations(tokens, Mask::kCounted));
    result.remarks.push_back(fmt::format(
        "windows below {} are not used: attention is planned as full, which "
        "changes operations per token by {}",
        how_many(seq, "token"), percent(masked)));
  }
  return result;
}

}  // namespace shardbook::planner
