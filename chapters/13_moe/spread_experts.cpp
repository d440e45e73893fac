#include "chapters/13_moe/spread_experts.h"

#include <utility>

#include "chapters/13_moe/dispatch.h"
#include "core/check.h"
#include "core/context.h"

namespace shardbook::moe {
namespace {

/// This rank's E / ep experts.
Shards part_of(const ModelConfig& config, const ProcessGroup& ep) {
  const std::int64_t experts = config.llama.num_experts;
  SB_CHECK(experts % ep.size() == 0, "--ep ", ep.size(), ": ", experts,
           " experts do not divide by it; every rank has equally many");
  return {{0, ep.rank(), ep.size()}};
}

/// Choices of each expert in a run on shapes: as even as possible.
std::vector<std::int64_t> even_counts(std::int64_t choices,
                                      std::int64_t experts) {
  std::vector<std::int64_t> counts;
  for (std::int64_t e = 0; e < experts; ++e) {
    counts.push_back((choices + experts - 1 - e) / experts);
  }
  return counts;
}

}  // namespace

SpreadExperts::SpreadExperts(const std::string& name, const ModelConfig& config,
                             const InitOptions& init, ProcessGroup& ep,
                             std::shared_ptr<MoeRecord> record)
    : ModuleOf(name, config, init, part_of(config, ep)),
      name_(name),
      ep_(&ep),
      record_(std::move(record)) {}

Tensor SpreadExperts::through_experts(const Tensor& rows,
                                      const Choices& choices) {
  const std::int64_t s = rows.size(0), k = choices.weights.size(1);
  Routing routing;
  routing.tokens = s, routing.k = k, routing.experts = choices.experts;
  routing.expert = choices.chosen;

  MoeRecord::Load& load = record_->loads[name_];
  const bool is_again = RankContext::current().is_recomputing;
  const Tensor y = dropless(
      rows,
      {routing, choices.weights, ep_,
       // On shapes all ranks have as many tokens
       [&](int) { return even_counts(s * k, choices.experts); },
       [this](const Tensor& grouped) { return apply_experts(grouped); }},
      is_again ? load.sent_rows_again : load.sent_rows);

  (is_again ? load.forwards_again : load.forwards) += 1;
  if (!is_again) {
    const std::vector<std::int64_t> counts = routing.exp_counts();
    load.exp_counts.resize(counts.size());
    for (std::size_t e = 0; e < counts.size() && !rows.is_meta(); ++e) {
      load.exp_counts[e] += counts[e];
    }
  }
  return y;
}

decltype(LayerFactory::mlp) spread_experts(ProcessGroup& ep,
                                           std::shared_ptr<MoeRecord> record) {
  return [&ep, record](const std::string& name, const ModelConfig& config,
                       const InitOptions& init,
                       const LayerFactory& layers) -> AnyModule {
    if (!config.llama.has_experts_in(block_of(config, name))) {
      return {std::make_unique<GptMlp>(name, config, init, layers)};
    }
    return {std::make_unique<SpreadExperts>(name, config, init, ep, record)};
  };
}

}  // namespace shardbook::moe
