#include "chapters/13_moe/moe_layer.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "chapters/07_tensor_parallel/mappings.h"
#include "chapters/13_moe/dispatch.h"
#include "core/autograd.h"
#include "core/check.h"
#include "core/context.h"

namespace shardbook::moe {
namespace {

constexpr double kWeightStddev = 0.02;

int size_of(const ProcessGroup* group) {
  return group == nullptr ? 1 : group->size();
}
int rank_of(const ProcessGroup* group) {
  return group == nullptr ? 0 : group->rank();
}

ExpertsShape shape_of(const ModelConfig& config, const MoeOptions& options) {
  return {.experts = options.gate.num_experts,
          .width = config.n_embd,
          .hidden = 4 * config.n_embd,
          .stddev = config.initializer_range,
          .residual_stddev = residual_stddev(config),
          .are_copies = options.are_copies,
          .gelu = config.gelu};
}

/// Dim 1 of [E, C, M]: the slots.
const tensor_parallel::Cut kSlots{1};

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

void MoeRecord::Load::add(const std::vector<std::int64_t>& counts) {
  exp_counts.resize(counts.size());
  std::transform(counts.begin(), counts.end(), exp_counts.begin(),
                 exp_counts.begin(), std::plus<>());
}

MoeLayer::MoeLayer(const std::string& name, const ExpertsShape& shape,
                   const MoeOptions& options, const InitOptions& init,
                   AnyModule mlp_beside, AnyModule dropout,
                   const MoeGroups& groups, std::shared_ptr<MoeRecord> record)
    : gate(name + ".gate", shape.width, options.gate, init),
      experts(name + ".experts", shape, init, rank_of(groups.ep),
              size_of(groups.ep),
              options.expert_tensor_parallel ? groups.tp : nullptr),
      resid_dropout(std::move(dropout)),
      name_(name),
      options_(options),
      groups_(groups),
      record_(std::move(record)) {
  SB_CHECK(!(options.use_residual && options.shared_expert),
           "--residual: --shared-expert adds the same MLP in another way; give "
           "one of them");
  SB_CHECK(!options.is_dropless || size_of(groups.tp) == 1,
           "--dropless: tensor-parallel ranks cut the slots of experts, and "
           "there are none; leave out --tp");
  if (has_mlp_beside(options)) mlp.emplace(std::move(mlp_beside));
  if (options.use_residual) {
    coefficient_weight = make_parameter(name + ".coefficient.weight",
                                        {shape.width, 2}, kWeightStddev, init);
    coefficient_bias = make_constant_parameter({2}, 0, init);
  }
  if (options.shared_expert && options.gate_shared_expert) {
    shared_gate = make_parameter(name + ".shared_gate.weight", {shape.width, 1},
                                 kWeightStddev, init);
  }
}

void MoeLayer::members(MemberVisitor& visit) {
  visit.module("gate", gate);
  visit.module("experts", experts);
  visit.module("resid_dropout", *resid_dropout);
  if (mlp) visit.module("mlp", **mlp);
  if (coefficient_weight.defined()) {
    visit.parameter("coefficient.weight", coefficient_weight);
    visit.parameter("coefficient.bias", coefficient_bias);
  }
  if (shared_gate.defined()) visit.parameter("shared_gate.weight", shared_gate);
}

Tensor MoeLayer::forward(const Tensor& x) {
  const std::int64_t m = x.size(-1);
  const Tensor rows = reshape(x, {-1, m});

  // Gate: choose experts and weigh them
  GateCall call;
  call.name = name_ + ".gate";
  call.per_row = x.ndim() > 2 ? x.size(-2) : 1;
  call.part = record_->part;
  call.is_training = is_training();
  call.wants_z_loss = options_.z_coefficient > 0;
  call.is_dropless = options_.is_dropless;
  call.capacity_multiple = size_of(groups_.tp);
  if (size_of(groups_.ep) > 1) {
    call.max_over_ranks = [&](std::int64_t count) {
      return most_of_ranks(count, rows, call.per_row);
    };
  }
  const GateResult gated = gate.route(rows, call);
  remember(gated);

  // Dispatch, experts, combine
  Tensor y;
  if (options_.is_dropless) {
    const auto drawn = [&](int source) {
      return drawn_counts(source, rows.size(0), call.per_row);
    };
    y = dropless(rows,
                 {gated.routing, gated.weights, groups_.ep, drawn,
                  [this](const Tensor& own) { return experts(own); }},
                 record_->loads[name_].sent_rows);
  } else {
    y = with_capacity(rows, gated);
  }

  // Beside the experts: an MLP for all tokens
  if (options_.use_residual) {
    const Tensor w =
        softmax(linear(rows, coefficient_weight, coefficient_bias));
    const Tensor dense = reshape((*mlp)(x), rows.shape());
    y = add(mul(y, slice(w, 1, 0, 1)), mul(dense, slice(w, 1, 1, 2)));
  } else if (options_.shared_expert) {
    Tensor dense = reshape((*mlp)(x), rows.shape());
    if (shared_gate.defined()) {
      dense = mul(dense, sigmoid(matmul(rows, shared_gate)));
    }
    y = add(y, dense);
  }
  return resid_dropout(reshape(attach_losses(y, gated), x.shape()));
}

Tensor MoeLayer::with_capacity(const Tensor& rows, const GateResult& gated) {
  const Routing& routing = gated.routing;
  ProcessGroup* const tp = size_of(groups_.tp) > 1 ? groups_.tp : nullptr;
  check_slots(routing.capacity, size_of(tp));
  Tensor slots = options_.is_naive ? naive_dispatch(rows, routing)
                                   : dispatch(rows, routing);

  // Ranks of TP have the same tokens: each takes a part of the slots
  const auto part = [tp](const Tensor& all) {
    return tp ? tensor_parallel::scatter_to(all, *tp, kSlots) : all;
  };
  const auto whole = [tp](const Tensor& own) {
    return tp ? tensor_parallel::gather_from(own, *tp, kSlots) : own;
  };
  slots = to_experts(part(slots), groups_.ep);
  slots = options_.expert_tensor_parallel ? part(experts(whole(slots)))
                                          : experts(slots);
  slots = whole(from_experts(slots, groups_.ep, routing.experts));

  return options_.is_naive ? naive_combine(slots, routing, gated.weights)
                           : combine(slots, routing, gated.weights);
}

std::vector<std::int64_t> MoeLayer::drawn_counts(int source,
                                                 std::int64_t tokens,
                                                 std::int64_t per_row) const {
  RandomState random = RankContext::current().random;
  random.batch.first += (source - rank_of(groups_.ep)) * groups_.ep_stride;
  const TokenDraws draws(name_ + ".gate", random, per_row, record_->part);
  return draw_experts(tokens, gate.options, draws).exp_counts();
}

std::int64_t MoeLayer::most_of_ranks(std::int64_t count, const Tensor& rows,
                                     std::int64_t per_row) const {
  const MemoryScope kind(MemoryKind::kCommunication);
  const Tensor most = Tensor::full({}, static_cast<double>(count),
                                   {DType::kF64, rows.device()});
  groups_.ep->all_reduce(most, ReduceOp::kMax, "capacity").wait();
  if (!rows.is_meta()) return static_cast<std::int64_t>(most.item());
  for (int source = 0; source < groups_.ep->size(); ++source) {
    for (const std::int64_t each :
         drawn_counts(source, rows.size(0), per_row)) {
      count = std::max(count, each);
    }
  }
  return count;
}

Tensor MoeLayer::attach_losses(const Tensor& y, const GateResult& gated) {
  const Tensor aux = scale(gated.l_aux, options_.aux_coefficient);
  const Tensor losses =
      gated.z_loss.defined()
          ? add(aux, scale(gated.z_loss, options_.z_coefficient))
          : aux;
  // The losses join the graph: y stays as it is
  return autograd::custom_function(
      "attach_losses", {y, losses},
      [](const Tensors& in) { return Tensors{in[0]}; },
      [record = record_, like = losses.options()](const Tensors& grads) {
        return Tensors{grads[0], Tensor::full({}, record->loss_scale, like)};
      })[0];
}

void MoeLayer::remember(const GateResult& gated) {
  if (RankContext::current().is_recomputing) return;
  MoeRecord::Load& load = record_->loads[name_];
  const Routing& routing = gated.routing;
  load.forwards += 1;
  load.slots += routing.capacity;
  load.most_slots = std::max(load.most_slots, routing.capacity);
  if (routing.expert.empty()) return;
  load.add(routing.exp_counts());
  if (!options_.is_dropless) load.dropped += routing.num_dropped();
}

// --- Experts of a Llama ------------------------------------------------------

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
  // On shapes nothing is chosen
  if (!is_again) load.add(routing.exp_counts());
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

// --- A GPT -------------------------------------------------------------------

void check_slots(std::int64_t slots, int tp) {
  SB_CHECK(slots % tp == 0, "--tp ", tp, ": does not divide the ", slots,
           " slots of an expert; choose --capacity-factor or --batch so that "
           "it does");
}

std::int64_t experts_of_layer(const MoeOptions& options, std::int64_t layer) {
  if (options.num_experts.empty()) return options.gate.num_experts;
  const auto last = static_cast<std::int64_t>(options.num_experts.size()) - 1;
  return options.num_experts[at(std::min(layer, last))];
}

int most_experts(const MoeOptions& options) {
  const std::vector<int>& all = options.num_experts;
  return all.empty() ? static_cast<int>(options.gate.num_experts)
                     : *std::max_element(all.begin(), all.end());
}

decltype(LayerFactory::mlp) moe_mlp(const MoeOptions& options,
                                    const MoeGroups& groups,
                                    std::shared_ptr<MoeRecord> record) {
  return [options, groups, record](
             const std::string& name, const ModelConfig& config,
             const InitOptions& init, const LayerFactory& layers) -> AnyModule {
    // "transformer.h.3.mlp"
    const std::size_t dot = name.rfind('.');
    const std::size_t before = name.rfind('.', dot - 1);
    const std::int64_t layer =
        std::stoll(name.substr(before + 1, dot - before - 1));
    MoeOptions own = options;
    own.gate.num_experts = experts_of_layer(options, layer);
    if (own.gate.num_experts == 1) {
      return {std::make_unique<GptMlp>(name, config, init, layers)};
    }
    ModelConfig beside = config;
    beside.dropout = 0;  // drawn once, after the sum
    AnyModule mlp{nullptr};
    if (has_mlp_beside(own)) {
      mlp = {std::make_unique<GptMlp>(name + ".mlp", beside, init, layers)};
    }
    return {std::make_unique<MoeLayer>(
        name, shape_of(config, own), own, init, std::move(mlp),
        layers.dropout(config.dropout), groups, record)};
  };
}

bool has_mlp_beside(const MoeOptions& options) {
  return options.use_residual || options.shared_expert;
}

bool is_expert(const std::string& name) {
  return name.find(".experts.") != std::string::npos;
}

Shards expert_layout(const std::string& name, int ep_rank, int ep, int tp_rank,
                     int t) {
  Shards shards;
  if (!is_expert(name)) return shards;
  if (ep > 1) shards.push_back({0, ep_rank, ep});
  if (t == 1) return shards;
  const auto is = [&](const char* end) { return name.ends_with(end); };
  if (is(".c_fc.weight")) shards.push_back({2, tp_rank, t});
  if (is(".c_fc.bias")) shards.push_back({1, tp_rank, t});
  if (is(".c_proj.weight")) shards.push_back({1, tp_rank, t});
  return shards;
}

}  // namespace shardbook::moe
