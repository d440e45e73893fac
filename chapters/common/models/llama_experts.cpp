#include "chapters/common/models/llama_experts.h"

#include <algorithm>

#include "core/autograd.h"
#include "core/check.h"
#include "core/context.h"
#include "core/ops.h"

namespace shardbook {

const char* const kBalancingLossInParts =
    "the balancing loss is of all tokens of a batch together, and not a mean "
    "over micro-batches, stages or devices of one process; set "
    "output_router_logits to false";

namespace {

using Indices = std::vector<std::int64_t>;

std::size_t place_of(std::int64_t i) { return static_cast<std::size_t>(i); }

/// The rows of these indices; an index past the last row reads zeros. On shapes,
/// `count` of them.
Tensor rows_of(const Tensor& table, const Indices& indices,
               std::int64_t count) {
  const Tensor index =
      table.is_meta() ? Tensor::empty({count}, {DType::kI64, table.device()})
                      : Tensor::from_values(indices, {count}, table.device());
  return embedding_part(table, index, 0);
}

/// [S k]: the k most probable experts of each token, the first one first; of equal
/// ones, that of the lower index. Empty on shapes.
Indices most_probable(const Tensor& probabilities, std::int64_t k) {
  if (probabilities.is_meta()) return {};
  const std::vector<double> values = probabilities.to_vector<double>();
  const std::int64_t tokens = probabilities.size(0),
                     experts = probabilities.size(1);
  Indices chosen;
  std::vector<bool> is_taken;
  for (std::int64_t s = 0; s < tokens; ++s) {
    const double* const of_token = values.data() + s * experts;
    is_taken.assign(place_of(experts), false);
    for (std::int64_t j = 0; j < k; ++j) {
      std::int64_t best = -1;
      for (std::int64_t e = 0; e < experts; ++e) {
        if (is_taken[place_of(e)]) continue;
        if (best < 0 || of_token[e] > of_token[best]) best = e;
      }
      is_taken[place_of(best)] = true;
      chosen.push_back(best);
    }
  }
  return chosen;
}

/// Rows by expert, [E, longest]: cells are numbered row by row.
struct ExpertRows {
  std::int64_t longest = 0;  ///< rows of the busiest expert
  Indices token;  ///< of each cell; one past the last token: no token
  Indices cell;   ///< of each choice [S k]
};

ExpertRows rows_by_expert(const Indices& chosen, std::int64_t tokens,
                          std::int64_t k, std::int64_t experts) {
  ExpertRows rows;
  if (chosen.empty()) {  // on shapes, evenly
    rows.longest = (tokens * k + experts - 1) / experts;
    return rows;
  }
  Indices counts(place_of(experts), 0);
  for (const std::int64_t e : chosen) counts[place_of(e)] += 1;
  rows.longest = *std::max_element(counts.begin(), counts.end());
  rows.token.assign(place_of(experts * rows.longest), tokens);
  std::fill(counts.begin(), counts.end(), 0);
  for (std::size_t i = 0; i < chosen.size(); ++i) {
    const std::int64_t e = chosen[i];
    const std::int64_t cell = e * rows.longest + counts[place_of(e)]++;
    rows.token[place_of(cell)] = static_cast<std::int64_t>(i) / k;
    rows.cell.push_back(cell);
  }
  return rows;
}

}  // namespace

LlamaExperts::LlamaExperts(const std::string& name, const ModelConfig& config,
                           const InitOptions& init, const Shards& part)
    : num_experts_(config.llama.num_experts),
      experts_per_token_(config.llama.experts_per_token),
      divides_by_sum_(config.llama.norm_topk_prob),
      coefficient_(config.llama.has_balancing_loss()
                       ? config.llama.router_aux_loss_coef
                       : 0) {
  const LlamaConfig& llama = config.llama;
  const std::int64_t h = config.n_embd, experts = llama.num_experts,
                     f = llama.moe_intermediate_size;
  const double stddev = config.initializer_range;
  gate_weight =
      make_parameter(name + ".gate.weight", {h, experts}, stddev, init);
  InitOptions held = init;
  held.shards = part;
  gate_up_proj = make_parameter(name + ".experts.gate_up_proj",
                                {experts, h, 2 * f}, stddev, held);
  down_proj = make_parameter(name + ".experts.down_proj", {experts, f, h},
                             stddev, held);
}

void LlamaExperts::members(MemberVisitor& visit) {
  visit.parameter("gate.weight", gate_weight);
  visit.parameter("experts.gate_up_proj", gate_up_proj);
  visit.parameter("experts.down_proj", down_proj);
}

Tensor LlamaExperts::forward(const Tensor& x) {
  const std::int64_t experts = num_experts_, k = experts_per_token_;
  const Tensor rows = reshape(x, {-1, x.size(-1)});
  const std::int64_t tokens = rows.size(0);

  // Choose: on the host, from the values
  const DType wide = x.dtype() == DType::kF64 ? DType::kF64 : DType::kF32;
  const Tensor probabilities =
      softmax(to_dtype(matmul(rows, gate_weight), wide));
  const Indices chosen = most_probable(probabilities, k);
  if (is_balanced()) remember(probabilities, chosen);

  // Weigh: the probabilities of the chosen ones
  Indices of_choice = chosen;
  for (std::size_t i = 0; i < of_choice.size(); ++i) {
    of_choice[i] += static_cast<std::int64_t>(i) / k * experts;
  }
  Tensor weights =
      reshape(rows_of(reshape(probabilities, {tokens * experts, 1}), of_choice,
                      tokens * k),
              {tokens, k});
  if (divides_by_sum_) {
    weights = div(weights, reshape(sum(weights, 1), {tokens, 1}));
  }

  const Tensor y =
      reshape(through_experts(rows, {chosen, weights, experts}), x.shape());
  return is_balanced() ? balanced(y, probabilities) : y;
}

Tensor LlamaExperts::through_experts(const Tensor& rows,
                                     const Choices& choices) {
  const std::int64_t tokens = rows.size(0), h = rows.size(1);
  const std::int64_t k = experts_per_token_, experts = choices.experts;

  // Dispatch, experts: zeros stay zeros
  const ExpertRows by_expert =
      rows_by_expert(choices.chosen, tokens, k, experts);
  const std::int64_t cells = experts * by_expert.longest;
  const Tensor grouped = reshape(rows_of(rows, by_expert.token, cells),
                                 {experts, by_expert.longest, h});
  const Tensor outputs = apply_experts(grouped);

  // Combine: each token's own rows, in the order of its choices
  const Tensor back =
      reshape(rows_of(reshape(outputs, {cells, h}), by_expert.cell, tokens * k),
              {tokens, k, h});
  const Tensor factors =
      reshape(to_dtype(choices.weights, rows.dtype()), {tokens, k, 1});
  return sum(mul(back, factors), 1);
}

// --- The balancing loss ----------------------------------------------------------

void LlamaExperts::remember(const Tensor& probabilities,
                            const Indices& chosen) {
  if (RankContext::current().is_recomputing) return;
  softmax_gradient_ = Tensor();
  const auto experts = place_of(probabilities.size(1));
  shares_ = RouterShares();
  shares_.tokens = static_cast<double>(probabilities.size(0));
  shares_.chosen.assign(experts, 0);
  shares_.probability.assign(experts, 0);
  if (probabilities.is_meta()) return;
  for (const std::int64_t e : chosen) shares_.chosen[place_of(e)] += 1;
  const std::vector<double> values = probabilities.to_vector<double>();
  for (std::size_t i = 0; i < values.size(); ++i) {
    shares_.probability[i % experts] += values[i];
  }
}

// The gradient depends on the choices of all layers. It is known when backward
// arrives here, also in a block that is computed again: y stays as it is.
Tensor LlamaExperts::balanced(const Tensor& y, const Tensor& probabilities) {
  return autograd::custom_function(
      "balance", {y, probabilities},
      [](const Tensors& in) { return Tensors{in[0]}; },
      [this, tokens = probabilities.size(0), experts = probabilities.size(1),
       options = probabilities.options()](const Tensors& grads) {
        SB_CHECK(softmax_gradient_.defined(), kBalancingLossInParts);
        const Tensor ones = Tensor::full({tokens, 1}, 1, options);
        return Tensors{grads[0],
                       mul(ones, reshape(softmax_gradient_, {1, experts}))};
      })[0];
}

namespace {

std::vector<LlamaExperts*> balanced_layers(Module& model) {
  std::vector<LlamaExperts*> layers;
  for (const NamedModule& each : model.named_modules()) {
    auto* experts = dynamic_cast<LlamaExperts*>(each.module);
    if (experts != nullptr && experts->is_balanced()) layers.push_back(experts);
  }
  return layers;
}

/// Sums over the tokens of all layers.
RouterShares all_shares(const std::vector<LlamaExperts*>& layers) {
  RouterShares all;
  for (const LlamaExperts* layer : layers) {
    const RouterShares& one = layer->shares();
    all.tokens += one.tokens;
    all.chosen.resize(one.chosen.size(), 0);
    all.probability.resize(one.probability.size(), 0);
    for (std::size_t e = 0; e < one.chosen.size(); ++e) {
      all.chosen[e] += one.chosen[e];
      all.probability[e] += one.probability[e];
    }
  }
  return all;
}

double balancing_loss(const RouterShares& all) {
  double sum = 0;
  for (std::size_t e = 0; e < all.chosen.size(); ++e) {
    sum += all.chosen[e] / all.tokens * (all.probability[e] / all.tokens);
  }
  return static_cast<double>(all.chosen.size()) * sum;
}

/// d(balancing loss) / d(softmax of a token), times `factor`: [E]. Of ranks that
/// each have `tokens` and average their gradients, d times that of one device.
Tensor softmax_gradient(const RouterShares& all, double tokens, double factor,
                        const TensorOptions& options) {
  const auto experts = static_cast<std::int64_t>(all.chosen.size());
  if (options.device.is_meta()) return Tensor::empty({experts}, options);
  std::vector<double> values;
  for (const double chosen : all.chosen) {
    values.push_back(factor * static_cast<double>(experts) * chosen /
                     all.tokens / tokens);
  }
  return to_dtype(Tensor::from_values(values, {experts}, options.device),
                  options.dtype);
}

}  // namespace

std::int64_t num_balancing_shares(const ModelConfig& config) {
  return config.llama.has_balancing_loss() ? 1 + 2 * config.llama.num_experts
                                           : 0;
}

Tensor with_balancing_loss(Module& model, const Tensor& loss,
                           std::int64_t parts, const SumOfShares& sum) {
  const std::vector<LlamaExperts*> layers = balanced_layers(model);
  if (layers.empty()) return loss;
  SB_CHECK(parts == 1, kBalancingLossInParts);
  RouterShares all = all_shares(layers);
  const double tokens = all.tokens;
  if (sum) {
    std::vector<double> numbers = {all.tokens};
    numbers.insert(numbers.end(), all.chosen.begin(), all.chosen.end());
    numbers.insert(numbers.end(), all.probability.begin(),
                   all.probability.end());
    numbers = sum(numbers);
    const auto begin = numbers.begin() + 1;
    const auto half = begin + static_cast<std::ptrdiff_t>(all.chosen.size());
    all = {numbers[0], {begin, half}, {half, numbers.end()}};
  }
  const double coefficient = layers[0]->coefficient();
  return autograd::custom_function(
      "balancing_loss", {loss},
      [&](const Tensors& in) {
        return Tensors{add_scalar(in[0], coefficient * balancing_loss(all))};
      },
      [layers, all, tokens, coefficient](const Tensors& grads) {
        const Tensor gradient =
            mul(softmax_gradient(all, tokens, coefficient, grads[0].options()),
                grads[0]);
        const DType dtype = layers[0]->gate_weight.dtype() == DType::kF64
                                ? DType::kF64
                                : DType::kF32;
        for (LlamaExperts* layer : layers) {
          layer->set_softmax_gradient(to_dtype(gradient, dtype));
        }
        return grads;
      })[0];
}

std::optional<double> balancing_loss(Module& model) {
  const RouterShares all = all_shares(balanced_layers(model));
  // On shapes, nothing was
  const auto was_chosen = [](double tokens) { return tokens > 0; };
  if (std::none_of(all.chosen.begin(), all.chosen.end(), was_chosen)) {
    return std::nullopt;
  }
  return balancing_loss(all);
}

}  // namespace shardbook
