#include "chapters/13_moe/routing.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "core/check.h"
#include "core/ops.h"

namespace shardbook::moe {
namespace {

/// Position of the largest of n values (the first of equals), except the
/// `num_chosen` positions at `chosen`.
std::int64_t largest(const double* values, std::int64_t n,
                     const std::int64_t* chosen, std::int64_t num_chosen) {
  std::int64_t best = -1;
  for (std::int64_t i = 0; i < n; ++i) {
    const auto* end = chosen + num_chosen;
    if (std::find(chosen, end, i) != end) continue;
    if (best < 0 || values[i] > values[best]) best = i;
  }
  return best;
}

/// Logits of one token plus Gumbel noise.
std::vector<double> with_gumbel(const double* logits, std::int64_t n,
                                const TokenDraws& draws, const char* purpose,
                                std::int64_t token) {
  std::vector<double> noisy(logits, logits + n);
  for (std::int64_t e = 0; e < n; ++e) {
    noisy[at(e)] += draws.gumbel(purpose, token, e);
  }
  return noisy;
}

/// Keeps the first `capacity` choices of each expert: in the order of tokens, or
/// all first choices and then all second ones. It also numbers the slots.
void keep_first(Routing& routing, bool by_choice) {
  const std::int64_t s = routing.tokens, k = routing.k;
  std::vector<std::int64_t> next(at(routing.experts), 0);
  for (std::int64_t i = 0; i < s * k; ++i) {
    const std::int64_t choice = by_choice ? i % s * k + i / s : i;
    const std::int64_t expert = routing.expert[at(choice)];
    if (expert < 0) continue;
    const std::int64_t slot = next[at(expert)]++;
    routing.slot[at(choice)] = slot < routing.capacity ? slot : -1;
  }
}

/// Keeps the `capacity` best of each expert. Their slots follow the order of
/// tokens, counting only kept choices.
void keep_best(Routing& routing, const std::vector<double>& priority) {
  const std::int64_t n = routing.tokens * routing.k;
  std::vector<std::vector<std::int64_t>> chosen_by(at(routing.experts));
  for (std::int64_t choice = 0; choice < n; ++choice) {
    const std::int64_t expert = routing.expert[at(choice)];
    if (expert >= 0) chosen_by[at(expert)].push_back(choice);
  }
  for (std::vector<std::int64_t>& choices : chosen_by) {
    // The first of equal tokens stays
    std::stable_sort(choices.begin(), choices.end(), [&](auto a, auto b) {
      return priority[at(a)] > priority[at(b)];
    });
    if (static_cast<std::int64_t>(choices.size()) > routing.capacity) {
      choices.resize(at(routing.capacity));
    }
    std::sort(choices.begin(), choices.end());
    for (std::size_t slot = 0; slot < choices.size(); ++slot) {
      routing.slot[at(choices[slot])] = static_cast<std::int64_t>(slot);
    }
  }
}

}  // namespace

std::vector<std::string> noise_names() {
  return {"none", "jitter", "rsample", "noisy-top-k"};
}

Noise noise_of(const std::string& name) {
  const std::vector<std::string> names = noise_names();
  const auto found = std::find(names.begin(), names.end(), name);
  SB_CHECK(found != names.end(), "--noise ", name,
           ": give none, jitter, rsample or noisy-top-k");
  return static_cast<Noise>(found - names.begin());
}

// More than any model has; a rank keeps counts of each.
constexpr std::int64_t kMaxExperts = 1 << 20;

void check_gate(const GateOptions& options) {
  SB_CHECK(options.num_experts >= 1 && options.num_experts <= kMaxExperts,
           "--num-experts ", options.num_experts, ": give 1 to ", kMaxExperts);
  SB_CHECK(options.k >= 1 && options.k <= options.num_experts, "--top-k ",
           options.k, ": a token chooses among ", options.num_experts,
           " experts; give 1 to ", options.num_experts);
  SB_CHECK(options.noise != Noise::kRSample || options.k == 1,
           "--noise rsample: samples the one choice of --top-k 1, not ",
           options.k);
  SB_CHECK(options.capacity_factor > 0 && options.eval_capacity_factor > 0,
           "--capacity-factor ", options.capacity_factor,
           ": give a number above 0");
}

std::int64_t capacity(std::int64_t tokens, const GateOptions& options,
                      bool is_training) {
  const double factor =
      is_training ? options.capacity_factor : options.eval_capacity_factor;
  const double even = static_cast<double>(tokens) * factor *
                      static_cast<double>(options.k) /
                      static_cast<double>(options.num_experts);
  // A product that should be whole may be one rounding above it
  const auto slots = static_cast<std::int64_t>(std::ceil(even - 1e-6));
  return std::max(options.min_capacity, slots);
}

// --- Draws -------------------------------------------------------------------

TokenDraws::TokenDraws(const std::string& gate, const RandomState& random,
                       std::int64_t per_row, SamplePart part)
    : gate_(gate), random_(random), per_row_(per_row), part_(std::move(part)) {
  if (part_.place.empty()) {
    part_.whole = per_row;
    part_.place.resize(at(per_row));
    std::iota(part_.place.begin(), part_.place.end(), 0);
  }
  const auto places = static_cast<std::int64_t>(part_.place.size());
  SB_CHECK(places == per_row, "moe: ", gate, " routes ", per_row,
           " tokens of each sample, and has the places of ", places,
           "; give a place for every token");
}

std::uint64_t TokenDraws::stream(const char* purpose) const {
  return stream_of(gate_ + "." + purpose) +
         0x9E3779B97F4A7C15U * (random_.step + 1);
}

double TokenDraws::uniform(const char* purpose, std::int64_t token,
                           std::int64_t index) const {
  const std::int64_t row =
      random_.batch.first + token / per_row_ * random_.batch.stride;
  const std::int64_t global =
      row * part_.whole + part_.place[at(token % per_row_)];
  const auto element = (static_cast<std::uint64_t>(index) << 40U) +
                       static_cast<std::uint64_t>(global);
  return (random_bits(random_.seed, stream(purpose), element) + 0.5) * 0x1p-32;
}

double TokenDraws::gumbel(const char* purpose, std::int64_t token,
                          std::int64_t index) const {
  return -std::log(-std::log(uniform(purpose, token, index)));
}

// --- Choosing ----------------------------------------------------------------

Routing choose_experts(const GateValues& values, std::int64_t tokens,
                       const GateOptions& options, const TokenDraws& draws,
                       bool is_training, const std::vector<bool>& used_token) {
  check_gate(options);
  const std::int64_t experts = options.num_experts, k = options.k;
  Routing routing;
  routing.tokens = tokens, routing.k = k, routing.experts = experts;
  routing.expert.assign(at(tokens * k), -1);
  routing.slot.assign(at(tokens * k), -1);
  const bool samples_first = options.noise == Noise::kRSample && is_training;
  const bool samples_second =
      k == 2 && options.second_expert_sampling && is_training;
  for (std::int64_t s = 0; s < tokens; ++s) {
    if (!used_token.empty() && !used_token[at(s)]) continue;
    const double* gates = values.gates.data() + s * experts;
    const double* logits = values.logits.data() + s * experts;
    std::int64_t* chosen = routing.expert.data() + s * k;
    const double* ranked = k > 2 ? logits : gates;
    std::vector<double> open(ranked, ranked + experts);
    for (std::int64_t j = 0; j < k; ++j) {
      if (j == 0 && samples_first) {
        open = with_gumbel(logits, experts, draws, "rsample", s);
      } else if (j == 1 && samples_second) {
        open = with_gumbel(logits, experts, draws, "second", s);
      }
      chosen[j] = largest(open.data(), experts, chosen, j);
    }
  }
  return routing;
}

Routing draw_experts(std::int64_t tokens, const GateOptions& options,
                     const TokenDraws& draws) {
  check_gate(options);
  const std::int64_t k = options.k;
  Routing routing;
  routing.tokens = tokens, routing.k = k;
  routing.experts = options.num_experts;
  routing.expert.resize(at(tokens * k));
  routing.slot.assign(at(tokens * k), -1);
  for (std::int64_t s = 0; s < tokens; ++s) {
    std::vector<std::int64_t> left(at(options.num_experts));
    std::iota(left.begin(), left.end(), 0);
    for (std::int64_t j = 0; j < k; ++j) {
      const auto place = static_cast<std::ptrdiff_t>(
          draws.uniform("shapes", s, j) * static_cast<double>(left.size()));
      routing.expert[at(s * k + j)] = left[at(place)];
      left.erase(left.begin() + place);
    }
  }
  return routing;
}

void take_slots(Routing& routing, std::int64_t capacity,
                const std::vector<double>& gates, const GateOptions& options,
                const TokenDraws& draws, bool is_training) {
  routing.capacity = capacity;
  const std::int64_t k = routing.k;
  std::vector<double> priority(routing.expert.size(), 0);
  if (k == 1 && options.use_rts && is_training && options.drop_tokens) {
    for (std::int64_t s = 0; s < routing.tokens; ++s) {
      priority[at(s)] = draws.uniform("rts", s);
    }
    keep_best(routing, priority);
  } else if (k == 2) {
    keep_first(routing, /*by_choice=*/true);
  } else if (k > 2 && options.drop_policy == DropPolicy::kProbs) {
    for (std::size_t choice = 0; choice < priority.size(); ++choice) {
      const std::int64_t expert = routing.expert[choice];
      if (expert < 0) continue;
      const std::int64_t token = static_cast<std::int64_t>(choice) / k;
      priority[choice] =
          gates.empty() ? 0 : gates[at(token * routing.experts + expert)];
    }
    keep_best(routing, priority);
  } else {
    keep_first(routing, /*by_choice=*/false);
  }
}

// --- Counting ----------------------------------------------------------------

std::vector<std::int64_t> Routing::exp_counts() const {
  std::vector<std::int64_t> counts(at(experts), 0);
  for (const std::int64_t each : expert) {
    if (each >= 0) counts[at(each)] += 1;
  }
  return counts;
}

std::int64_t Routing::num_kept() const {
  return std::count_if(slot.begin(), slot.end(), [](auto s) { return s >= 0; });
}

std::int64_t Routing::num_dropped() const {
  const auto routed = std::count_if(expert.begin(), expert.end(),
                                    [](auto each) { return each >= 0; });
  return routed - num_kept();
}

SortedChoices sort_by_expert(const Routing& routing) {
  SortedChoices sorted;
  sorted.counts = routing.exp_counts();
  for (std::int64_t choice = 0; choice < routing.tokens * routing.k; ++choice) {
    if (routing.expert[at(choice)] >= 0) sorted.choice.push_back(choice);
  }
  std::stable_sort(sorted.choice.begin(), sorted.choice.end(),
                   [&](auto a, auto b) {
                     return routing.expert[at(a)] < routing.expert[at(b)];
                   });
  return sorted;
}

}  // namespace shardbook::moe
