#include "chapters/13_moe/gate.h"

#include <algorithm>

#include "core/ops.h"

namespace shardbook::moe {
namespace {

constexpr double kJitter = 1e-2;
constexpr double kGateStddev = 0.02;

/// log(1 + exp(x)), which does not overflow.
Tensor softplus(const Tensor& x) {
  return add(relu(x), log(add_scalar(exp(neg(abs(x))), 1)));
}

/// log(sum(exp(x))) of each row: [S, E] -> [S, 1].
Tensor log_sum_exp(const Tensor& x) {
  return sub(slice(x, 1, 0, 1), slice(log_softmax(x), 1, 0, 1));
}

/// Tokens at equal distances in their sample.
struct PlaceRun {
  std::int64_t first = 0, count = 1, step = 1;
};
std::vector<PlaceRun> runs_of(const GateCall& call) {
  if (call.part.place.empty()) return {{0, call.per_row, 1}};
  std::vector<PlaceRun> runs;
  for (const std::int64_t place : call.part.place) {
    if (!runs.empty()) {
      PlaceRun& run = runs.back();
      if (run.count == 1) run.step = place - run.first;
      if (place == run.first + run.count * run.step) {
        ++run.count;
        continue;
      }
    }
    runs.push_back({place, 1, 1});
  }
  return runs;
}

/// Random numbers for x [S, n], equal to one device's for the same elements of
/// [B, tokens of a sample, n]. `fill` draws them.
using Fill = std::function<void(const Tensor& values, const ShardView& view)>;
Tensor drawn(const Tensor& x, const GateCall& call, const Fill& fill) {
  const BatchSlice& batch = RankContext::current().random.batch;
  const std::int64_t rows = x.size(0) / call.per_row, width = x.size(1);
  const std::int64_t last = batch.first + (rows - 1) * batch.stride;
  const std::int64_t whole =
      call.part.place.empty() ? call.per_row : call.part.whole;
  Tensors parts;
  for (const PlaceRun& run : runs_of(call)) {
    parts.push_back(Tensor::empty({rows, run.count, width}, x.options()));
    fill(parts.back(), {{last + 1, whole, width},
                        {batch.first, run.first, 0},
                        {batch.stride, run.step, 1}});
  }
  const Tensor all = parts.size() == 1 ? parts[0] : concat(parts, 1);
  return reshape(all, x.shape());
}

/// Values made on the host, which no operation converts; on meta, none.
Tensor value_tensor(const std::vector<double>& values, const Shape& shape,
                    const Tensor& like) {
  if (like.is_meta()) return Tensor::empty(shape, like.options());
  if (like.dtype() == DType::kF64) {
    return Tensor::from_values(values, shape, like.device());
  }
  return Tensor::from_values(std::vector<float>(values.begin(), values.end()),
                             shape, like.device());
}

/// [E]: the fraction of tokens whose first choice is this expert (k >= 3: its
/// share of all choices).
Tensor first_choices(const Routing& routing, const Tensor& gates) {
  std::vector<double> share(at(routing.experts), 0);
  const std::int64_t counted = routing.k > 2 ? routing.k : 1;
  for (std::int64_t s = 0; s < routing.tokens && !gates.is_meta(); ++s) {
    for (std::int64_t j = 0; j < counted; ++j) {
      const std::int64_t expert = routing.expert[at(s * routing.k + j)];
      if (expert < 0) continue;
      share[at(expert)] += 1 / static_cast<double>(routing.tokens * counted);
    }
  }
  return value_tensor(share, {routing.experts}, gates);
}

/// The probabilities of the chosen experts, as shares of the kept ones.
Tensor weights_of(const Routing& routing, const Tensor& gates,
                  bool is_dropless) {
  const std::int64_t s = routing.tokens, k = routing.k, e = routing.experts;
  const std::int64_t n = s * k;
  // Dropped choices point past the table, where zeros are read
  std::vector<std::int64_t> place;
  std::vector<double> kept_none;
  if (!gates.is_meta()) {
    place.assign(at(n), s * e);
    kept_none.assign(at(s), 1);
    for (std::int64_t i = 0; i < n; ++i) {
      const auto choice = at(i);
      const std::int64_t expert = routing.expert[choice];
      if (expert < 0 || (!is_dropless && routing.slot[choice] < 0)) continue;
      place[choice] = i / k * e + expert;
      kept_none[at(i / k)] = 0;
    }
  }
  const Tensor table = reshape(gates, {s * e, 1});
  const Tensor picked = reshape(
      embedding_part(table, index_tensor(place, {n}, gates), 0), {s, k});
  if (k == 1) return picked;
  // Tokens without a kept choice divide by 1
  const Tensor ones = value_tensor(kept_none, {s}, gates);
  return div(picked, reshape(add(sum(picked, 1), ones), {s, 1}));
}

}  // namespace

Tensor index_tensor(const std::vector<std::int64_t>& values, const Shape& shape,
                    const Tensor& like) {
  if (like.is_meta()) return Tensor::empty(shape, {DType::kI64, like.device()});
  return Tensor::from_values(values, shape, like.device());
}

TopKGate::TopKGate(const std::string& name, std::int64_t width,
                   const GateOptions& options, const InitOptions& init)
    : options(options) {
  check_gate(options);
  weight = make_parameter(name + ".weight", {width, options.num_experts},
                          kGateStddev, init);
  if (options.noise == Noise::kNoisyTopK) {
    noise_weight =
        make_constant_parameter({width, options.num_experts}, 0, init);
  }
}

void TopKGate::members(MemberVisitor& visit) {
  visit.parameter("weight", weight);
  if (noise_weight.defined()) visit.parameter("noise_weight", noise_weight);
}

Tensor TopKGate::logits_of(const Tensor& x, const TokenDraws& draws,
                           const GateCall& call) const {
  const DType dtype = x.dtype() == DType::kF64 ? DType::kF64 : DType::kF32;
  Tensor input = to_dtype(x, dtype);
  if (options.noise == Noise::kJitter && call.is_training) {
    const Tensor factors = drawn(input, call, [&](auto& values, auto& view) {
      fill_uniform(values, draws.seed(), draws.stream("jitter"), 1 - kJitter,
                   1 + kJitter, view);
    });
    input = mul(input, factors);
  }
  Tensor logits = matmul(input, to_dtype(weight, dtype));
  if (options.noise == Noise::kNoisyTopK && call.is_training) {
    const Tensor normal = drawn(logits, call, [&](auto& values, auto& view) {
      fill_normal(values, draws.seed(), draws.stream("noisy"), 0, 1, view);
    });
    const Tensor spread =
        softplus(matmul(input, to_dtype(noise_weight, dtype)));
    logits = add(logits, mul(normal, spread));
  }
  return logits;
}

GateResult TopKGate::route(const Tensor& x, const GateCall& call) const {
  const std::int64_t tokens = x.size(0);
  const TokenDraws draws(call.name, RankContext::current().random, call.per_row,
                         call.part);
  const Tensor logits = logits_of(x, draws, call);
  const Tensor gates = softmax(logits);

  // Choose: on the host, from the values
  GateResult result;
  const bool needs_counts = !options.drop_tokens || call.is_dropless;
  GateValues values;
  if (!x.is_meta()) {
    values = {gates.to_vector<double>(), logits.to_vector<double>()};
    result.routing = choose_experts(values, tokens, options, draws,
                                    call.is_training, call.used_token);
  } else if (needs_counts) {
    result.routing = draw_experts(tokens, options, draws);
  }
  Routing& routing = result.routing;
  routing.tokens = tokens, routing.k = options.k;
  routing.experts = options.num_experts;

  // Take slots
  if (!call.is_dropless) {
    std::int64_t slots = capacity(tokens, options, call.is_training);
    if (!options.drop_tokens) {
      const std::vector<std::int64_t> counts = routing.exp_counts();
      slots = *std::max_element(counts.begin(), counts.end());
      if (call.max_over_ranks) slots = call.max_over_ranks(slots);
      const std::int64_t multiple = call.capacity_multiple;
      slots = std::max<std::int64_t>(1, slots);
      slots = (slots + multiple - 1) / multiple * multiple;
    }
    routing.capacity = slots;
    if (!routing.expert.empty()) {
      take_slots(routing, slots, values.gates, options, draws,
                 call.is_training);
    }
  }

  // Weigh
  result.weights = weights_of(routing, gates, call.is_dropless);
  const Tensor shares = mul(mean(gates, 0), first_choices(routing, gates));
  result.l_aux = scale(sum(shares), static_cast<double>(options.num_experts));
  if (call.wants_z_loss) result.z_loss = mean(square(log_sum_exp(logits)));
  return result;
}

// --- The dense form ------------------------------------------------------------

Tensor combine_mask(const Routing& routing, const Tensor& weights) {
  const std::int64_t s = routing.tokens, e = routing.experts,
                     c = routing.capacity, n = s * routing.k;
  std::vector<std::int64_t> from(at(s * e * c), n);
  for (std::int64_t i = 0; i < n && !weights.is_meta(); ++i) {
    const std::int64_t expert = routing.expert[at(i)];
    const std::int64_t slot = routing.slot[at(i)];
    if (slot < 0) continue;
    from[at((i / routing.k * e + expert) * c + slot)] = i;
  }
  const Tensor index = index_tensor(from, {s * e * c}, weights);
  return reshape(embedding_part(reshape(weights, {n, 1}), index, 0), {s, e, c});
}

Tensor dispatch_mask(const Routing& routing, const TensorOptions& options) {
  const NoGrad no_grad;
  return combine_mask(routing,
                      Tensor::full({routing.tokens, routing.k}, 1, options));
}

}  // namespace shardbook::moe
