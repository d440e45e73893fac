#pragma once

// What the notebook 13_moe calls: gates drawn at random, tables of tokens and
// slots, and runs on ranks.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "chapters/13_moe/dispatch.h"
#include "chapters/13_moe/gate.h"
#include "chapters/13_moe/load.h"
#include "chapters/13_moe/moe_strategy.h"
#include "chapters/common/run/program.h"
#include "comm/device_mesh.h"
#include "core/ops.h"
#include "notebooks/lessons.h"
#include "notebooks/live_ranks.h"

namespace notes {

using namespace shardbook::notebook;

// --- Gates and slots -----------------------------------------------------------

/// Normal logits and their softmax, for each token; `lean` is added to the
/// logits of expert 0.
inline moe::GateValues random_gates(std::int64_t tokens, std::int64_t experts,
                                    double lean) {
  const Tensor logits =
      numbers({tokens, experts}, "logits", /*mean=*/0, /*seed=*/3);
  auto* values = static_cast<double*>(logits.raw());
  for (std::int64_t t = 0; t < tokens; ++t) values[t * experts] += lean;
  return {softmax(logits).to_vector<double>(), logits.to_vector<double>()};
}

/// The gates of `tokens` tokens from number `first` on.
inline moe::GateValues part_of(const moe::GateValues& all, std::int64_t first,
                               std::int64_t tokens, std::int64_t experts) {
  const auto cut = [&](const std::vector<double>& values) {
    const auto begin = values.begin() + first * experts;
    return std::vector<double>(begin, begin + tokens * experts);
  };
  return {cut(all.gates), cut(all.logits)};
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

inline std::string place_text(const moe::Routing& routing,
                              std::int64_t choice) {
  const auto i = static_cast<std::size_t>(choice);
  const std::string expert = joined("expert ", routing.expert[i]);
  return routing.slot[i] < 0 ? expert + ": full"
                             : joined(expert, ", slot ", routing.slot[i]);
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
  for (std::int64_t t = 0; t < routing.tokens; ++t) {
    rows.push_back({std::to_string(t)});
    for (std::int64_t e = 0; e < routing.experts; ++e) {
      const auto i = static_cast<std::size_t>(t * routing.experts + e);
      rows.back().push_back(fixed(values.gates[i], 2));
    }
    for (std::int64_t j = 0; j < routing.k; ++j) {
      rows.back().push_back(place_text(routing, t * routing.k + j));
    }
  }
  return table(rows);
}

/// The load of the busiest expert, over an even one.
inline double busiest(const std::vector<std::int64_t>& counts) {
  double most = 0, all = 0;
  for (const std::int64_t count : counts) {
    most = std::max(most, static_cast<double>(count));
    all += static_cast<double>(count);
  }
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
    const moe::GateValues values = random_gates(kTokens, kExperts, lean);
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

// --- Tokens that travel --------------------------------------------------------

struct Journey {
  std::vector<double> arrived = {};   ///< [own experts, ranks, slots]
  std::vector<double> returned = {};  ///< [tokens]
};

/// Numbers, a dot for each empty place, a bar between the ranks.
inline std::string numbers_text(const std::vector<double>& all,
                                std::size_t begin, std::size_t end,
                                std::size_t per_rank) {
  std::string text;
  for (std::size_t i = begin; i < end; ++i) {
    if (i > begin && (i - begin) % per_rank == 0) text += " |";
    text += all[i] == 0 ? "  ." : " " + fixed(all[i], 0);
  }
  return text;
}

/// Two ranks with two experts each.
inline Picture journeys(const std::vector<Journey>& all) {
  Rows rows = {{"rank", "expert", "slots"}};
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    const std::size_t size = all[rank].arrived.size() / 2;
    for (std::size_t e = 0; e < 2; ++e) {
      rows.push_back({std::to_string(rank), std::to_string(2 * rank + e),
                      numbers_text(all[rank].arrived, e * size, (e + 1) * size,
                                   size / 2)});
    }
  }
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    rows.push_back({std::to_string(rank), "back home",
                    numbers_text(all[rank].returned, 0, 4, 4)});
  }
  return table(rows);
}

// --- The gradient of an expert -------------------------------------------------

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
  double sum = 0;
  for (int rank = 0; rank < 2; ++rank) {
    const std::vector<double> x = tokens_of(rank).to_vector<double>();
    const auto first = static_cast<std::size_t>(2 * expert);
    sum += x[first] * x[first] + x[first + 1] * x[first + 1];
  }
  return 2 * sum / 8;
}

/// Beside one device: the gradient behind backward, divided in several ways.
inline Picture gradients(const std::vector<double>& after_backward,
                         const std::vector<double>& divisors) {
  Rows rows = {{"expert", "one device", "after backward"}};
  for (const double by : divisors) rows[0].push_back("/ " + fixed(by, 0));
  for (int expert = 0; expert < 2; ++expert) {
    const double own = after_backward[static_cast<std::size_t>(expert)];
    rows.push_back({std::to_string(expert), fixed(right_gradient(expert), 4),
                    fixed(own, 4)});
    for (const double by : divisors) rows.back().push_back(fixed(own / by, 4));
  }
  return table(rows);
}

// --- Trainings -----------------------------------------------------------------

inline Options small_options(std::int64_t steps) {
  Options options = nano_options("13_moe", 4, 8, steps);
  options.dtype = DType::kF64;
  return options;
}

/// The report, and the choices that each expert has got.
struct Training {
  Report report = {};
  moe::Loads loads = {};
};

inline Training train(const Options& options,
                      const moe::StrategyOptions& setup) {
  Training result;
  ChapterRun chapter;
  chapter.rank = [&](const Options& options, ProcessGroup& world, Run& run) {
    DeviceMesh mesh(world,
                    moe::expert_topology(moe::group_sizes(options, setup)));
    moe::MoeStrategy strategy(options, setup, mesh);
    run.train(options, strategy);
    const moe::Loads loads = strategy.global_loads();
    if (world.rank() == 0) result.loads = loads;
  };
  chapter.reference = [&](const Options& options) {
    return moe::train_reference(options, setup);
  };
  result.report = run_and_compare(options, chapter);
  return result;
}

/// The largest load of an expert, on average over the layers, for several
/// factors of the balancing loss.
inline Picture sweep(const std::vector<double>& coefficients) {
  std::vector<Bar> all;
  for (const double coefficient : coefficients) {
    moe::StrategyOptions setup;
    setup.moe.aux_coefficient = coefficient;
    Options options = small_options(30);
    options.check = false;
    const Training training = train(options, setup);
    double load = 0;
    for (const auto& [layer, counts] : training.loads) {
      load += busiest(counts) / static_cast<double>(training.loads.size());
    }
    all.push_back({"coefficient " + fixed(coefficient, 2), load});
  }
  return bars("The balancing loss brings the busiest expert near an even load",
              all, {"x even", 1});
}

/// Two steps with this number of ranks for a set of experts.
inline NamedTimelines run_of(const std::string& name, int ep, int zero_stage) {
  moe::StrategyOptions setup;
  setup.ep = ep;
  setup.zero_stage = zero_stage;
  return {name, train(small_options(2), setup).report.timelines};
}

/// Exposed messages of GPTs of these widths, for 8 ranks of `textbook` with
/// 16,384 tokens each.
inline Picture exposed_shares(const std::vector<int>& widths) {
  std::vector<Bar> all;
  for (const int width : widths) {
    const std::string model =
        joined(R"({"n_layer": 4, "n_head": 4, "vocab_size": 256, )"
               R"("n_positions": 1024, "n_embd": )",
               width, "}");
    Options options = textbook_options("13_moe", model, 128, 1024, 2);
    options.check = false;
    const Report report = train(options, {}).report;
    all.push_back({joined("width ", width),
                   report.time.exposed_comm_s / report.time.step_s});
  }
  return bars("Wider experts wait less for their tokens", all, {"%", 0.01},
              "comm");
}

// --- Answers -------------------------------------------------------------------

/// Bytes of all-to-alls that rank 0 sends in the first step.
inline double counted_bytes(ProcessGroup& world, const Options& options) {
  const moe::StrategyOptions setup;
  DeviceMesh mesh(world,
                  moe::expert_topology(moe::group_sizes(options, setup)));
  moe::MoeStrategy strategy(options, setup, mesh);
  world.clear_records();
  strategy.step(0);
  double bytes = 0;
  for (const CommRecord& record : world.records()) {
    if (record.op == CommOp::kAllToAll) bytes += wire_bytes(record);
  }
  return bytes;
}

inline double slots() {
  moe::GateOptions options = gate_options(8, 2, 1.25);
  options.min_capacity = 4;
  return static_cast<double>(moe::capacity(26, options, true));
}

}  // namespace notes
