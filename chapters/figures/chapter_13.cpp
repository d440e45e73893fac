// Experts: slots, the load with and without the balancing loss, drops.

#include <fmt/format.h>

#include <algorithm>

#include "chapters/13_moe/gate.h"
#include "chapters/13_moe/load.h"
#include "chapters/13_moe/moe_strategy.h"
#include "chapters/13_moe/routing.h"
#include "chapters/common/run/program.h"
#include "chapters/figures/pages.h"
#include "chapters/figures/plot.h"
#include "chapters/figures/ranks.h"
#include "chapters/pictures/charts.h"
#include "comm/device_mesh.h"
#include "core/ops.h"

namespace shardbook::figures::page_13 {
namespace {

using pictures::Figure;

// Gates drawn at random; all tokens lean towards expert 0.
moe::GateValues random_gates(std::int64_t tokens, std::int64_t experts,
                             double lean, std::uint64_t seed) {
  const Tensor logits =
      Tensor::empty({tokens, experts}, {DType::kF64, Device()});
  fill_normal(logits, seed, stream_of("logits"), 0, 1);
  auto* values = static_cast<double*>(logits.raw());
  for (std::int64_t t = 0; t < tokens; ++t) values[t * experts] += lean;
  return {softmax(logits).to_vector<double>(), logits.to_vector<double>()};
}

moe::Routing route(const moe::GateValues& values, std::int64_t tokens,
                   std::int64_t experts, double factor) {
  moe::GateOptions options;
  options.num_experts = experts;
  options.capacity_factor = factor;
  options.min_capacity = 1;
  options.use_rts = false;  // the first tokens keep their places
  const moe::TokenDraws draws("gate", RandomState(), tokens);
  moe::Routing routing =
      moe::choose_experts(values, tokens, options, draws, true);
  moe::take_slots(routing, moe::capacity(tokens, options, true), values.gates,
                  options, draws, true);
  return routing;
}

std::string slots() {
  constexpr int kRanks = 2, kTokens = 8, kExperts = 4;
  constexpr double kRow = 19, kTokenX = 120, kSlotX = 380, kBox = 34;
  std::vector<moe::Routing> routings;
  std::int64_t dropped = 0;
  for (int rank = 0; rank < kRanks; ++rank) {
    routings.push_back(route(random_gates(kTokens, kExperts, 0.3, 5 + rank),
                             kTokens, kExperts, 1));
    dropped += routings.back().num_dropped();
  }
  const std::int64_t capacity = routings[0].capacity;
  Figure figure(
      fmt::format(
          "{} of 16 tokens find their expert full, and {} slots stay "
          "empty\nEach expert has {} slots for the tokens of each rank.",
          dropped, dropped, capacity),
      640);
  const double top = figure.add_row(30 + kRow * kRanks * kTokens + 30) + 24;
  figure.text(kTokenX, top - 10, "tokens");
  figure.text(kSlotX, top - 10, "slots of the experts");
  const auto token_y = [&](int rank, int token) {
    return top + kRow * (rank * kTokens + token) + 12 * rank;
  };
  const auto slot_y = [&](int expert, int rank, std::int64_t slot) {
    return top +
           kRow * static_cast<double>(capacity * (2 * expert + rank) + slot) +
           6 * expert;
  };
  for (int expert = 0; expert < kExperts; ++expert) {
    const int owner = expert / (kExperts / kRanks);
    for (int rank = 0; rank < kRanks; ++rank) {
      for (std::int64_t slot = 0; slot < capacity; ++slot) {
        figure.box({kSlotX, slot_y(expert, rank, slot), kBox, kRow - 2},
                   "empty");
      }
    }
    figure.text(kSlotX + kBox + 10, slot_y(expert, 1, 0) + 4,
                fmt::format("expert {}, on rank {}", expert, owner),
                Figure::Anchor::kStart, rank_color(owner));
  }
  for (int rank = 0; rank < kRanks; ++rank) {
    figure.text(0, token_y(rank, kTokens / 2), fmt::format("rank {}", rank),
                Figure::Anchor::kStart, rank_color(rank));
    for (int token = 0; token < kTokens; ++token) {
      const moe::Routing& routing = routings[static_cast<std::size_t>(rank)];
      const auto t = static_cast<std::size_t>(token);
      const double y = token_y(rank, token);
      const std::string name = fmt::format("t{}", rank * kTokens + token);
      const auto box = [&](double x, double y) {
        figure.colored_box({x, y, kBox, kRow - 2}, rank_color(rank));
        figure.text(x + kBox / 2, y + 13, name, Figure::Anchor::kMiddle,
                    "#ffffff");
      };
      box(kTokenX, y);
      const auto expert = static_cast<int>(routing.expert[t]);
      if (routing.slot[t] < 0) {
        figure.text(kTokenX - 8, y + 13, "dropped", Figure::Anchor::kEnd,
                    pictures::kMuted);
        continue;
      }
      const double to = slot_y(expert, rank, routing.slot[t]);
      figure.line(
          {{kTokenX + kBox + 2, y + kRow / 2}, {kSlotX - 2, to + kRow / 2}},
          rank_color(rank), 1.2);
      box(kSlotX, to);
    }
  }
  return figure.svg("");
}

// The choices of each expert, over all layers, in the last of 30 steps.
pictures::Series load(const std::string& name, double coefficient) {
  Options options = on_shapes("none", 4, "gpt-nano", 8, 32);
  options.backend = "threads";
  options.data = "walk";
  options.dtype = DType::kF64;
  options.steps = 30;
  moe::StrategyOptions setup;
  setup.moe.aux_coefficient = coefficient;
  pictures::Series series{name, {}};
  ChapterRun chapter;
  chapter.rank = [&](const Options& options, ProcessGroup& world, Run& run) {
    DeviceMesh mesh(world,
                    moe::expert_topology(moe::group_sizes(options, setup)));
    moe::MoeStrategy strategy(options, setup, mesh);
    run.train(options, strategy);
    const moe::Loads loads = strategy.global_loads();
    if (world.rank() != 0) return;
    double sum = 0;
    for (const auto& [layer, counts] : loads) {
      series.values.resize(counts.size());
      for (std::size_t e = 0; e < counts.size(); ++e) {
        series.values[e] += static_cast<double>(counts[e]);
        sum += static_cast<double>(counts[e]);
      }
    }
    const auto experts = static_cast<double>(series.values.size());
    for (double& value : series.values) value *= experts / sum;
  };
  run_and_compare(options, chapter);
  return series;
}

std::string balance() {
  return pictures::columns(
             "The balancing loss brings every expert near an even load\n"
             "Load of each expert after 30 steps, over the even load",
             {load("without it", 0), load("coefficient 0.1", 0.1)}, "expert", 1)
      .svg;
}

std::string drops() {
  constexpr std::int64_t kTokens = 4096, kExperts = 16;
  Figure figure(
      "Capacity helps where the load is nearly even\n"
      "4096 tokens, 16 experts, top-1",
      640);
  const double y = Plot::row(figure, 220);
  Plot plot(figure, {50, y, 360, 220},
            {"capacity factor: slots over tokens", 1, 4},
            {"dropped tokens", 0, 0.8, {"%", 0.01}});
  for (const auto& [lean, stroke] :
       {std::pair(0.0, kBlue), std::pair(1.0, kGreen), std::pair(2.0, kGold),
        std::pair(3.0, kOrange)}) {
    const moe::GateValues values = random_gates(kTokens, kExperts, lean, 3);
    std::vector<Value> shares;
    double busiest = 0;
    for (double factor = 1; factor <= 4; factor += 0.25) {
      const moe::Routing routing = route(values, kTokens, kExperts, factor);
      shares.push_back(
          {factor, static_cast<double>(routing.num_dropped()) / kTokens});
      for (const std::int64_t count : routing.exp_counts()) {
        busiest = std::max(busiest, static_cast<double>(count * kExperts) /
                                        static_cast<double>(kTokens));
      }
    }
    plot.curve(shares, stroke,
               fmt::format("busiest expert: {:.1f} x even", busiest));
  }
  plot.labels();
  return figure.svg("");
}

}  // namespace

std::vector<PageFigure> all() {
  return {{"chapters/13_moe/slots.svg", slots},
          {"chapters/13_moe/balance.svg", balance},
          {"chapters/13_moe/drops.svg", drops}};
}

}  // namespace shardbook::figures::page_13
