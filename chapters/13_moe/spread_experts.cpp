#include "chapters/13_moe/spread_experts.h"

#include <utility>

#include "chapters/07_tensor_parallel/mappings.h"
#include "chapters/13_moe/dispatch.h"
#include "core/check.h"
#include "core/context.h"

namespace shardbook::moe {
namespace {

/// E / ep experts; the columns of gate and up are cut each by itself. Another dim
/// cuts hidden units for each of the two weights.
ExpertParts parts_of(const ModelConfig& config, const MoeGroups& groups) {
  const auto size = [](const ProcessGroup* group) {
    return group == nullptr ? 1 : group->size();
  };
  const auto rank = [](const ProcessGroup* group) {
    return group == nullptr ? 0 : group->rank();
  };
  const LlamaConfig& llama = config.llama;
  const int ep = size(groups.ep), t = size(groups.tp);
  SB_CHECK(llama.num_experts % ep == 0, "--ep ", ep, ": ", llama.num_experts,
           " experts do not divide by it; every rank has equally many");
  SB_CHECK(llama.moe_intermediate_size % t == 0, "--tp ", t, ": ",
           llama.moe_intermediate_size,
           " hidden units of an expert do not divide by it");
  const auto of = [&](const char* name) {
    return expert_layout(name, rank(groups.ep), ep, rank(groups.tp), t);
  };
  return {of(".experts.gate_up_proj"), of(".experts.down_proj")};
}

/// Choices of a run on shapes: all experts equally often.
std::vector<std::int64_t> even_choices(std::int64_t choices,
                                       std::int64_t experts) {
  std::vector<std::int64_t> chosen;
  for (std::int64_t i = 0; i < choices; ++i) chosen.push_back(i % experts);
  return chosen;
}

}  // namespace

SpreadExperts::SpreadExperts(const std::string& name, const ModelConfig& config,
                             const InitOptions& init, const MoeGroups& groups,
                             std::shared_ptr<MoeRecord> record)
    : ModuleOf(name, config, init, parts_of(config, groups)),
      name_(name),
      groups_(groups),
      record_(std::move(record)) {}

Tensor SpreadExperts::through_experts(const Tensor& rows,
                                      const Choices& choices) {
  const std::int64_t s = rows.size(0), k = choices.weights.size(1);
  Routing routing;
  routing.tokens = s, routing.k = k, routing.experts = choices.experts;
  routing.expert =
      rows.is_meta() ? even_choices(s * k, choices.experts) : choices.chosen;

  // Other ranks of TP have other hidden units of the same experts: backward sums
  // the gradients of the rows and of the weights, forward the results
  ProcessGroup* const tp = groups_.tp;
  const bool is_cut = tp != nullptr && tp->size() > 1;
  const auto copied = [&](const Tensor& x) {
    return is_cut ? tensor_parallel::copy_to(x, *tp) : x;
  };
  MoeRecord::Load& load = record_->loads[name_];
  const Tensor weights = copied(choices.weights);
  const Tensor y = dropless(
      copied(rows),
      {routing, weights, groups_.ep,
       // On shapes all ranks have as many tokens
       [&](int) { return routing.exp_counts(); },
       [this](const Tensor& grouped) { return apply_experts(grouped); }},
      load.sent_rows);

  if (!RankContext::current().is_recomputing) {
    load.forwards += 1;
    const std::vector<std::int64_t> counts = routing.exp_counts();
    load.exp_counts.resize(counts.size());
    for (std::size_t e = 0; e < counts.size() && !rows.is_meta(); ++e) {
      load.exp_counts[e] += counts[e];
    }
  }
  return is_cut ? tensor_parallel::reduce_from(y, *tp) : y;
}

decltype(LayerFactory::mlp) spread_experts(const MoeGroups& groups,
                                           std::shared_ptr<MoeRecord> record) {
  return [groups, record](const std::string& name, const ModelConfig& config,
                          const InitOptions& init,
                          const LayerFactory& layers) -> AnyModule {
    if (!config.llama.has_experts_in(block_of(config, name))) {
      return {std::make_unique<GptMlp>(name, config, init, layers)};
    }
    return {
        std::make_unique<SpreadExperts>(name, config, init, groups, record)};
  };
}

}  // namespace shardbook::moe
