// Experts: slots, the load with and without the balancing loss, drops.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>

#include "chapters/13_moe/gate.h"
#include "chapters/13_moe/load.h"
#include "chapters/13_moe/routing.h"
#include "chapters/common/run/textbook.h"
#include "chapters/figures/figures.h"
#include "chapters/pictures/plot.h"
#include "core/ops.h"

namespace shardbook::figures::page_13 {

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
  constexpr double kRow = 19, kTokenX = 126, kSlotX = 326, kBox = 34;
  std::vector<moe::Routing> routings;
  std::int64_t dropped = 0;
  for (int rank = 0; rank < kRanks; ++rank) {
    routings.push_back(route(random_gates(kTokens, kExperts, 0.3, 5 + rank),
                             kTokens, kExperts, 1));
    dropped += routings.back().num_dropped();
  }
  const std::int64_t capacity = routings[0].capacity;
  Figure figure(
      fmt::format("{} of 16 tokens find their expert full, and {} slots stay "
                  "empty\nEach expert has {} slots for the tokens of each "
                  "rank.",
                  dropped, dropped, capacity),
      500);
  const double top = figure.add_row(kRow * kRanks * kTokens + 78) + 34;
  figure.middle(kTokenX + kBox / 2, top - 18, "tokens");
  figure.middle((kTokenX + kBox + kSlotX) / 2, top - 18, "all-to-all", "comm");
  figure.middle(kSlotX + kBox / 2, top - 18, "slots");
  const auto token_y = [&](int rank, int token) {
    return top + kRow * (rank * kTokens + token) + 30 * rank;
  };
  const auto slot_y = [&](int expert, int rank, std::int64_t slot) {
    return top + kRow * (capacity * (2 * expert + rank) + slot) +
           6 * (expert % 2) + 30 * (expert / 2);
  };
  for (int rank = 0; rank < kRanks; ++rank) {
    const double from = token_y(rank, 0) - 7;
    const double to = token_y(rank, kTokens - 1) + kRow + 9;
    // What a rank has is in a frame of its colour
    const double right = kSlotX - 8;
    for (const Box& frame :
         {Box{0, from, kTokenX + kBox + 8, to - from},
          Box{right, from, figure.width() - 2 - right, to - from}}) {
      figure.framed_box(frame, kWhite, rank_color(rank));
    }
    for (const double x : {8.0, figure.width() - 54}) {
      figure.rank_name(x, from + 18, rank);
    }
  }
  for (int expert = 0; expert < kExperts; ++expert) {
    for (int rank = 0; rank < kRanks; ++rank) {
      for (std::int64_t slot = 0; slot < capacity; ++slot) {
        figure.box({kSlotX, slot_y(expert, rank, slot), kBox, kRow - 2},
                   "empty");
      }
    }
    figure.text(kSlotX + kBox + 10, slot_y(expert, 1, 0) + 4,
                fmt::format("expert {}", expert));
  }
  for (int rank = 0; rank < kRanks; ++rank) {
    for (int token = 0; token < kTokens; ++token) {
      const moe::Routing& routing = routings[rank];
      const std::int64_t slot = routing.slot[token];
      const double y = token_y(rank, token);
      const std::string name = fmt::format("t{}", rank * kTokens + token);
      const auto box = [&](double x, double y) {
        figure.box({x, y, kBox, kRow - 2}, rank_color(rank));
        figure.middle(x + kBox / 2, y + 13, name, kWhite);
      };
      box(kTokenX, y);
      if (slot < 0) {
        figure.end(kTokenX - 8, y + 13, "dropped", kMuted);
        continue;
      }
      const double to = slot_y(routing.expert[token], rank, slot);
      figure.line(
          {{kTokenX + kBox + 2, y + kRow / 2}, {kSlotX - 2, to + kRow / 2}},
          rank_color(rank), 1.2);
      box(kSlotX, to);
    }
  }
  return figure.svg(
      "Tokens in their slots keep the colour of their rank: half of the slots "
      "of each expert hold tokens of the other rank.");
}

// The choices of each expert, over all layers, in the last of 30 steps, over an
// even load.
Series load(const std::string& name, double coefficient) {
  const Report report = run_once(fmt::format(
      "13_moe --model gpt-nano --data walk --dtype f64 --cluster none "
      "--world-size 4 --batch 8 --seq 32 --steps 30 --no-check "
      "--aux-coefficient {}",
      coefficient));
  std::vector<std::int64_t> counts;
  for (const auto& [key, json] : report.more) {
    if (key != "expert_loads") continue;
    for (const auto& layer : nlohmann::json::parse(json)) {
      counts.resize(layer.size());
      for (std::size_t e = 0; e < layer.size(); ++e) {
        counts[e] += layer[e].get<std::int64_t>();
      }
    }
  }
  return {name, moe::load_shares(counts)};
}

std::string balance() {
  const std::vector<Series> rows = {load("without the loss", 0),
                                    load("coefficient 0.1", 0.1)};
  std::vector<double> sorted = rows[0].values;
  std::sort(sorted.begin(), sorted.end(), std::greater<>());
  return columns(
             fmt::format(
                 "Without the loss, 3 of 8 experts get {:.0f} % of the tokens\n"
                 "Tokens of each expert after 30 steps, over an even load",
                 100 * (sorted[0] + sorted[1] + sorted[2]) / 8),
             rows, "expert", 1)
      .svg;
}

std::string drops() {
  constexpr std::int64_t kTokens = 4096, kExperts = 16;
  Plot plot(
      "Capacity helps where the load is nearly even\n"
      "4096 tokens, 16 experts, top-1",
      {50, 300, 220, 500}, {"capacity factor: slots over tokens", 1, 4},
      {"dropped tokens", 0, 0.8, kPercent});
  for (const auto& [lean, stroke] :
       {std::pair(0.0, kBlue), std::pair(1.0, kGreen), std::pair(2.0, kGold),
        std::pair(3.0, kOrange)}) {
    const moe::GateValues values = random_gates(kTokens, kExperts, lean, 3);
    std::vector<Value> shares;
    double busiest = 0;
    for (double factor = 1; factor <= 4; factor += 0.25) {
      const moe::Routing routing = route(values, kTokens, kExperts, factor);
      shares.push_back({factor, 1.0 * routing.num_dropped() / kTokens});
      busiest =
          std::max(busiest, most_of(routing.exp_counts(), std::identity()));
    }
    plot.curve(
        shares, stroke,
        fmt::format("busiest: {:.1f} x even", busiest * kExperts / kTokens));
  }
  return plot.svg();
}

// The time of all-to-alls as a share of all-to-alls and experts' products.
std::vector<Value> message_shares(const std::string& cluster, int ranks,
                                  int samples,
                                  const std::vector<double>& widths) {
  constexpr int kSeq = 1024;
  double product = 0;  // the FLOPs of an expert's
  const auto line = [&](double width) {
    product = 8.0 * samples * kSeq * width * width;
    // At no width is the output layer's product as large as an expert's
    return "13_moe" +
           on_shapes(cluster, ranks, gpt_of(2, width, 4, 1000, 1024),
                     samples * ranks, kSeq) +
           fmt::format(" --steps 2 --num-experts 64 --ep {}{}", ranks,
                       cluster == "textbook" ? "" : " --dtype bf16");
  };
  return sweep(line, widths, [&](const Report& report) {
    double messages = 0, products = 0;
    for (const sim::TimelineEvent& event : first_rank(report).events) {
      const double seconds = event.end_s - event.begin_s;
      if (event.name == "all_to_all") messages += seconds;
      if (event.name == "matmul" && event.flops == product) products += seconds;
    }
    return messages / (messages + products);
  });
}

std::string threshold() {
  // x e rate / (12 bandwidth): x is the share of the slots that travel over
  // the slowest link
  const auto least_width = [](double x, double e, double rate,
                              double bandwidth) {
    return x * e * rate / (12 * bandwidth);
  };
  const sim::Cluster a100 = sim::Cluster::read("dgx-a100");
  const double rate = a100.device.peak_flops.at(DType::kBF16);
  const double nic = a100.network.bytes_per_s;
  struct Case {
    const char* name;
    std::string cluster;
    int ranks;
    Stroke stroke;
    double width;
  };
  const std::vector<Case> cases = {
      {"8 A100", "dgx-a100", 8, kGreen,
       least_width(7.0 / 8, 2, rate, a100.intra_node.bytes_per_s)},
      {"8 of textbook", "textbook", 8, kBlue,
       least_width(7.0 / 8, 4, textbook::kRate, textbook::kBandwidth)},
      {"64 A100", "dgx-a100", 64, kOrange,
       least_width(56.0 / 64, 2, rate, nic)}};
  const std::vector<double> widths = {64,  96,   128,  192,  256,  384, 512,
                                      768, 1024, 1536, 2048, 3072, 4096};
  Plot plot(
      "Above the marked widths, products outweigh all-to-alls\n"
      "64 experts. Curves: 32,768 tokens of each rank; dots: 2048",
      {50, 340, 250, 500}, logarithmic("width h", 64, 4096),
      {"all-to-alls, share of all-to-alls and experts' products", 0, 1,
       kPercent});
  plot.across(0.5, 1, "4 3");
  for (const Case& each : cases) {
    const bool is_textbook = each.cluster == "textbook";
    plot.mark(each.width, each.stroke, fmt::format("{:.0f}", each.width));
    // Heads divide the width, and the kernels of A100 want multiples of eight
    const int step = is_textbook ? 4 : 8;
    const int marked = step * static_cast<int>(std::lround(each.width / step));
    std::vector<double> with_marked = widths;
    with_marked.push_back(marked);
    std::sort(with_marked.begin(), with_marked.end());
    const std::vector<Value> shares =
        message_shares(each.cluster, each.ranks, 32, with_marked);
    plot.curve(shares, each.stroke, each.name);
    if (is_textbook) {
      plot.dots(message_shares(each.cluster, each.ranks, 2, widths),
                each.stroke);
    }
  }
  return plot.svg();
}

std::vector<PageFigure> all() {
  return {{"chapters/13_moe/slots.svg", slots},
          {"chapters/13_moe/balance.svg", balance},
          {"chapters/13_moe/drops.svg", drops},
          {"chapters/13_moe/threshold.svg", threshold}};
}

}  // namespace shardbook::figures::page_13
