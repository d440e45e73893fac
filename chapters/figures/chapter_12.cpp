// Sequence parallelism: who computes which part of the mask.

#include <fmt/format.h>

#include <array>
#include <ranges>

#include "chapters/12_sequence_parallel/ring_exchange.h"
#include "chapters/12_sequence_parallel/sequence_layout.h"
#include "chapters/12_sequence_parallel/sequence_strategy.h"
#include "chapters/common/run/textbook.h"
#include "chapters/figures/figures.h"
#include "core/attention_block.h"

namespace shardbook::figures::page_12 {

namespace sp = sequence_parallel;

constexpr std::array<sp::Layout, 3> kLayouts = {
    sp::Layout::kContiguous, sp::Layout::kZigzag, sp::Layout::kStriped};

// 16 tokens on 4 ranks.
constexpr int kRanks = 4;
constexpr std::int64_t kTokens = 16;

// Pairs of query and key that `rank` computes in step `step` of the ring.
double pairs_in_step(sp::Layout layout, int rank, int step) {
  return sp::visible_pairs(layout, rank, sp::source_at(rank, step, kRanks),
                           kRanks, kTokens / kRanks);
}

// Those of the rank that has the most.
double most_in_step(sp::Layout layout, int step) {
  return most_of(std::views::iota(0, kRanks),
                 [&](int rank) { return pairs_in_step(layout, rank, step); });
}

double sum_of_most(sp::Layout layout) {
  double sum = 0;
  for (int step = 0; step < kRanks; ++step) sum += most_in_step(layout, step);
  return sum;
}

std::string mask() {
  constexpr double kCell = 9, kPanel = 166;
  Figure figure(
      "Contiguous slices give the last rank most of the work\n"
      "Query i meets the keys 0 to i. A row has the colour of the query's "
      "rank.\nBelow: the rank's pairs of query and key, of 136.",
      490);
  const double top = figure.add_row(24 + kTokens * kCell + 10 + kRanks * 18);
  for (std::size_t l = 0; l < kLayouts.size(); ++l) {
    const sp::Layout layout = kLayouts[l];
    const double left = kPanel * l;
    figure.text(left, top + 14, sp::layout_name(layout));
    for (int rank = 0; rank < kRanks; ++rank) {
      double pairs = 0;
      for (const std::int64_t query :
           sp::positions(layout, rank, kRanks, kTokens)) {
        for (std::int64_t key = 0; key <= query; ++key) {
          figure.box({left + kCell * key, top + 22 + kCell * query, kCell - 1,
                      kCell - 1},
                     rank_color(rank));
        }
      }
      for (int step = 0; step < kRanks; ++step) {
        pairs += pairs_in_step(layout, rank, step);
      }
      const double y = top + 26 + kTokens * kCell + 18 * rank;
      figure.rank_name(left, y + 13, rank);
      figure.box({left + 44, y + 2, 1.5 * pairs, 13}, rank_color(rank));
      figure.text(left + 48 + 1.5 * pairs, y + 13, fmt::format("{:g}", pairs));
    }
  }
  return figure.svg();
}

// Four steps of a ring under a causal mask: which block of keys each rank has,
// and which block of the mask it computes with it.
std::string ring() {
  constexpr double kCell = 30, kPanel = 250, kLeft = 52;
  Figure figure(
      "In four steps, the keys of all ranks visit each rank\n"
      "A row: a rank's queries. A column: a rank's keys. Large: computed\n"
      "now; small: before; pale: hidden by the mask, so the rank waits.",
      490);
  double top = 0;
  for (int step = 0; step < kRanks; ++step) {
    if (step % 2 == 0) top = figure.add_row(44 + kRanks * kCell + 14);
    const double left = kPanel * (step % 2);
    figure.text(left, top + 14, fmt::format("step {}", step));
    for (int rank = 0; rank < kRanks; ++rank) {
      const double y = top + 40 + kCell * rank;
      figure.middle(left + kLeft + kCell * rank + kCell / 2, top + 34,
                    std::to_string(rank), rank_color(rank));
      figure.rank_name(left, y + 19, rank);
      for (int before = 0; before <= step; ++before) {
        const int source = sp::source_at(rank, before, kRanks);
        const double x = left + kLeft + kCell * source;
        const double inset = before == step ? 2 : 9;
        const Box at = {x + inset, y + inset, kCell - 2 * inset,
                        kCell - 2 * inset};
        if (pairs_in_step(sp::Layout::kContiguous, rank, before) == 0) {
          if (before == step) figure.box(at, "empty");
        } else if (source < rank) {
          figure.box(at, rank_color(rank));
        } else {  // the diagonal: half of a square
          figure.path(
              fmt::format("M{0:g} {1:g} L{0:g} {2:g} L{3:g} {2:g} Z", at.x,
                          at.y, at.y + at.height, at.x + at.width),
              rank_color(rank));
        }
      }
      const int held = sp::source_at(rank, step, kRanks);
      figure.text(left + kLeft + kRanks * kCell + 8, y + 19, "has keys",
                  kMuted);
      figure.text(left + kLeft + kRanks * kCell + 60, y + 19,
                  std::to_string(held), rank_color(held));
    }
  }
  return figure.svg();
}

// The pairs that each rank computes in each step of the ring.
std::string steps() {
  constexpr double kPanel = 166, kBar = 9, kStep = 50, kUnit = 6.2;
  Figure figure(
      fmt::format("Sum of the longest bars: {:g} pairs, in zigzag order {:g}\n"
                  "Pairs of query and key that each rank computes in each "
                  "step;\n16 tokens on 4 ranks",
                  sum_of_most(sp::Layout::kContiguous),
                  sum_of_most(sp::Layout::kZigzag)),
      490);
  const double top = figure.add_row(24 + kRanks * kStep + 24);
  for (std::size_t l = 0; l < kLayouts.size(); ++l) {
    const double left = kPanel * l;
    figure.text(left, top + 14, sp::layout_name(kLayouts[l]));
    for (int step = 0; step < kRanks; ++step) {
      const double y = top + 26 + kStep * step;
      figure.text(left, y + 22, std::to_string(step), kMuted);
      for (int rank = 0; rank < kRanks; ++rank) {
        const double pairs = pairs_in_step(kLayouts[l], rank, step);
        figure.box({left + 16, y + kBar * rank, kUnit * pairs, kBar - 1},
                   rank_color(rank));
      }
      const double most = most_in_step(kLayouts[l], step);
      const double end = left + 16 + kUnit * most;
      figure.line({{end, y - 3}, {end, y + kRanks * kBar + 2}}, kInk);
      figure.text(end + 4, y + 22, fmt::format("{:g}", most));
    }
    figure.text(left + 16, top + 26 + kRanks * kStep + 12,
                fmt::format("together {:g}", sum_of_most(kLayouts[l])));
  }
  figure.text(0, figure.add_row(18) + 13,
              "at the left: the step; bars: ranks 0 to 3, from the top",
              kMuted);
  return figure.svg();
}

// One sequence of so many tokens and 4 blocks on 8 ranks.
std::string line_of(const std::string& cluster, int vocabulary,
                    std::int64_t tokens, const std::string& options) {
  return "12_sequence_parallel" +
         on_shapes(cluster, 8, gpt_of(4, 1024, 16, vocabulary, tokens), 1,
                   tokens) +
         options;
}

std::string times() {
  const auto times_of = [](const std::string& kind) {
    return sweep(
        [&](double tokens) {
          return line_of("dgx-a100", 50257, tokens,
                         " --dtype bf16 --steps 2 --kind " + kind);
        },
        {4096, 8192, 16384, 32768, 65536, 131072}, step_s);
  };
  Plot plot(
      "From 16 Ki tokens on, zigzag is faster than contiguous slices\n"
      "A step of 4 blocks of width 1024 in bf16, on 8 A100",
      {50, 300, 220, 490},
      {"tokens of the one sequence", 4096, 131072, {"Ki", 1024}, true},
      {"step", 0.008, 2.048, kMilliseconds, true});
  plot.curve(times_of("ring"), kOrange, "ring, contiguous");
  plot.curve(times_of("ring --layout zigzag"), kBlue, "ring, zigzag");
  plot.curve(times_of("ulysses"), kGreen, "Ulysses");
  return plot.svg();
}

std::string threshold() {
  constexpr double kTokens = 4 * textbook::kRate / textbook::kBandwidth;
  const auto exposed = [](const std::string& kind) {
    return sweep(
        [&](double own) {
          return line_of("textbook", 256, 8 * own, " --steps 1 --kind " + kind);
        },
        {512, 1024, 2048, 3072, 4096, 6144, 8192}, exposed_s);
  };
  const auto ring = exposed("ring --layout zigzag");
  const auto ulysses = exposed("ulysses");
  Plot plot(
      "From eγ/β tokens of a rank on, hops hide behind attention\n"
      "8 ranks of textbook, f32, a model of 4 blocks of width 1024",
      {50, 330, 220, 490},
      marked("tokens of a rank, s/c", {0, 2048, 4096, 6144, 8192}),
      {"exposed communication in a step", 0, 0.02, kMilliseconds});
  plot.mark(kTokens, kBlue, fmt::format("eγ/β = {:.0f}", kTokens));
  plot.dotted_curve(ring, kBlue, "ring, zigzag");
  plot.dotted_curve(ulysses, kGreen, "Ulysses");
  return plot.svg();
}

std::vector<PageFigure> all() {
  return {{"chapters/12_sequence_parallel/mask.svg", mask},
          {"chapters/12_sequence_parallel/ring.svg", ring},
          {"chapters/12_sequence_parallel/steps.svg", steps},
          {"chapters/12_sequence_parallel/threshold.svg", threshold},
          {"chapters/12_sequence_parallel/times.svg", times}};
}

}  // namespace shardbook::figures::page_12
