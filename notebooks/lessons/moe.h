#pragma once

// What the notebook 13_moe calls: gates drawn at random, tables of tokens and
// slots, and runs on ranks.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "chapters/13_moe/dispatch.h"
#include "chapters/13_moe/gate.h"
#include "chapters/13_moe/load.h"
#include "chapters/programs/programs.h"
#include "core/ops.h"
#include "notebooks/lessons.h"

namespace notes {

using namespace shardbook::notebook;

// --- Gates and slots ---------------------------------------------------------

/// Normal numbers; `lean` is added to the logits of expert 0.
inline Tensor random_logits(std::int64_t tokens, std::int64_t experts,
                            double lean) {
  const Tensor logits =
      numbers({tokens, experts}, "logits", /*mean=*/0, /*seed=*/3);
  auto* values = static_cast<double*>(logits.raw());
  for (std::int64_t t = 0; t < tokens; ++t) values[t * experts] += lean;
  return logits;
}

inline moe::GateValues gates_of(const Tensor& logits) {
  return {softmax(logits).to_vector<double>(), logits.to_vector<double>()};
}

/// Without random numbers: the first tokens keep their slots.
inline moe::GateOptions gate_options(std::int64_t experts, std::int64_t k,
                                     double factor) {
  moe::GateOptions options;
  options.num_experts = experts;
  options.k = k;
  options.capacity_factor = factor;
  options.min_capacity = 1;
  options.use_rts = false;
  options.second_expert_sampling = false;
  return options;
}

/// A row per token: the probability of each expert, and the place of each
/// choice.
inline Picture places(const moe::GateValues& values,
                      const moe::Routing& routing) {
  Rows rows = {{"token"}};
  for (std::int64_t e = 0; e < routing.experts; ++e) {
    rows[0].push_back(joined("p", e));
  }
  for (std::int64_t j = 0; j < routing.k; ++j) {
    rows[0].push_back(joined("choice ", j + 1));
  }
  std::size_t gate = 0, choice = 0;
  for (std::int64_t t = 0; t < routing.tokens; ++t) {
    rows.push_back(cells(t));
    for (std::int64_t e = 0; e < routing.experts; ++e) {
      rows.back().push_back(fixed(values.gates[gate++], 2));
    }
    for (std::int64_t j = 0; j < routing.k; ++j, ++choice) {
      const auto slot = routing.slot[choice];
      rows.back().push_back(
          joined("expert ", routing.expert[choice],
                 slot < 0 ? ": full" : joined(", slot ", slot)));
    }
  }
  return table(rows);
}

/// The load of the busiest expert, over an even one.
inline double busiest(const std::vector<std::int64_t>& counts) {
  const double most = *std::max_element(counts.begin(), counts.end());
  const double all = std::accumulate(counts.begin(), counts.end(), 0.0);
  return most * static_cast<double>(counts.size()) / all;
}

/// Dropped shares of 4096 tokens for 16 experts. `route(values, tokens,
/// options)` gives their slots.
template <typename Route>
Picture drops(const std::vector<double>& leans,
              const std::vector<double>& factors, const Route& route) {
  constexpr std::int64_t kTokens = 4096, kExperts = 16;
  Rows rows = {{"lean", "busiest expert"}};
  for (const double factor : factors) {
    rows[0].push_back("factor " + fixed(factor, 2));
  }
  for (const double lean : leans) {
    const moe::GateValues values =
        gates_of(random_logits(kTokens, kExperts, lean));
    rows.push_back({fixed(lean, 1)});
    for (const double factor : factors) {
      const moe::Routing routing =
          route(values, kTokens, gate_options(kExperts, 1, factor));
      if (rows.back().size() == 1) {
        rows.back().push_back(fixed(busiest(routing.exp_counts()), 2) +
                              " x even");
      }
      rows.back().push_back(
          percent(static_cast<double>(routing.num_dropped()) / kTokens, 1));
    }
  }
  return table(rows);
}

// --- Tokens that travel ------------------------------------------------------

struct Journey {
  std::vector<double> arrived = {};   ///< [own experts, ranks, slots]
  std::vector<double> returned = {};  ///< [tokens]
};

/// Two ranks with two experts each. A dot is an empty place; a bar is between
/// the slots of two ranks.
inline Picture journeys(const std::vector<Journey>& all) {
  const auto text_of = [](const double* begin, std::size_t size,
                          std::size_t per_rank) {
    std::string text;
    for (std::size_t i = 0; i < size; ++i) {
      if (i > 0 && i % per_rank == 0) text += " |";
      text += begin[i] == 0 ? "  ." : " " + fixed(begin[i], 0);
    }
    return text;
  };
  Rows rows = {{"rank", "expert", "slots"}};
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    const std::size_t size = all[rank].arrived.size() / 2;
    for (std::size_t e = 0; e < 2; ++e) {
      rows.push_back(
          cells(rank, 2 * rank + e,
                text_of(all[rank].arrived.data() + e * size, size, size / 2)));
    }
  }
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    rows.push_back(
        cells(rank, "back home", text_of(all[rank].returned.data(), 4, 4)));
  }
  return table(rows);
}

// --- The gradient of an expert -----------------------------------------------

inline Tensor tokens_of(int rank) {
  return numbers({4, 1}, joined("tokens of ", rank), /*mean=*/0, /*seed=*/5);
}

/// Tokens 0 and 1 of each rank go to expert 0, the others to expert 1.
inline moe::Routing two_and_two() {
  moe::Routing routing;
  routing.tokens = 4;
  routing.k = 1;
  routing.experts = 2;
  routing.capacity = 2;
  routing.expert = {0, 0, 1, 1};
  routing.slot = {0, 1, 0, 1};
  return routing;
}

/// d/dw of the mean of (w x)^2 over all 8 tokens: 2 x^2 / 8, summed.
inline double right_gradient(int expert) {
  double squares = 0;
  for (int rank = 0; rank < 2; ++rank) {
    const Tensor x = slice(tokens_of(rank), 0, 2 * expert, 2 * expert + 2);
    squares += sum(square(x)).item();
  }
  return 2 * squares / 8;
}

/// Beside one device: the gradient behind backward, divided in several ways.
inline Picture gradients(const std::vector<double>& after_backward,
                         const std::vector<double>& divisors) {
  Rows rows = {{"expert", "one device", "after backward"}};
  for (const double by : divisors) rows[0].push_back("/ " + fixed(by, 0));
  for (int expert = 0; expert < 2; ++expert) {
    const double own = after_backward[static_cast<std::size_t>(expert)];
    rows.push_back(
        cells(expert, fixed(right_gradient(expert), 4), fixed(own, 4)));
    for (const double by : divisors) rows.back().push_back(fixed(own / by, 4));
  }
  return table(rows);
}

// --- Trainings ---------------------------------------------------------------

inline const std::string kSmall =
    "13_moe --dtype f64 --world-size 4 --batch 8" + kNano;

/// The choices that each expert has got, by layer.
inline moe::Loads loads_of(const Report& report) {
  return nl::json::parse(report.more.at(0).second).get<moe::Loads>();
}

/// The largest load of an expert, on average over the layers, for several
/// factors of the balancing loss.
inline Picture busiest_loads(const std::vector<double>& coefficients) {
  const auto bar_of = [](double coefficient) {
    const moe::Loads loads = loads_of(run(joined(
        kSmall, " --steps 30 --no-check --aux-coefficient ", coefficient)));
    double load = 0;
    for (const auto& [layer, counts] : loads) {
      load += busiest(counts) / static_cast<double>(loads.size());
    }
    return Bar{"coefficient " + fixed(coefficient, 2), load};
  };
  return bars("The balancing loss brings the busiest expert near an even load",
              mapped(coefficients, bar_of), {"x even", 1});
}

/// Exposed messages of GPTs of these widths, for 8 ranks of `textbook` with
/// 16,384 tokens each.
inline Picture exposed_shares(const std::vector<double>& widths) {
  const auto line = [](double width) {
    return joined(
        "13_moe --world-size 8 --batch 128 --seq 1024 --steps 2 --no-check",
        kTextbook, R"( --model '{"n_layer": 4, "n_head": 4, )",
        R"("vocab_size": 256, "n_positions": 1024, "n_embd": )", width, "}'");
  };
  return bars("Wider experts wait less for their tokens",
              bars_of("width ", sweep(line, widths, exposed_share)),
              {"%", 0.01}, "comm");
}

// --- Answers -----------------------------------------------------------------

inline double slots() {
  moe::GateOptions options = gate_options(8, 2, 1.25);
  options.min_capacity = 4;
  return static_cast<double>(moe::capacity(26, options, true));
}

}  // namespace notes
