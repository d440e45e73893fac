// Sequence parallelism: who computes which part of the mask.

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "chapters/12_sequence_parallel/ring_exchange.h"
#include "chapters/12_sequence_parallel/sequence_layout.h"
#include "chapters/12_sequence_parallel/sequence_strategy.h"
#include "chapters/figures/pages.h"
#include "chapters/figures/plot.h"
#include "chapters/figures/ranks.h"
#include "chapters/figures/runs.h"
#include "core/attention_block.h"

namespace shardbook::figures::page_12 {
namespace {

namespace sp = sequence_parallel;
using pictures::Figure;

constexpr std::array<sp::Layout, 3> kLayouts = {
    sp::Layout::kContiguous, sp::Layout::kZigzag, sp::Layout::kStriped};

// Pairs of query and key that `rank` computes in step `step` of the ring.
double pairs_in_step(sp::Layout layout, int rank, int step, int c,
                     std::int64_t s) {
  double pairs = 0;
  for (const AttentionBlock& block : sp::visible_blocks(
           layout, rank, sp::source_at(rank, step, c), c, s / c, true)) {
    pairs += visible_pairs(block);
  }
  return pairs;
}

std::string mask() {
  constexpr int kRanks = 4;
  constexpr std::int64_t kTokens = 16;
  constexpr double kCell = 11, kPanel = 218, kBar = 13;
  Figure figure(
      "Contiguous slices give the last rank most of the work\n"
      "Query i meets the keys 0 to i. A row has the colour of the rank that "
      "has the query.",
      640);
  const double top = figure.add_row(24 + kTokens * kCell + 20 + kRanks * 18);
  for (std::size_t l = 0; l < kLayouts.size(); ++l) {
    const sp::Layout layout = kLayouts[l];
    const double left = kPanel * static_cast<double>(l);
    figure.text(left, top + 14, sp::layout_name(layout));
    for (int rank = 0; rank < kRanks; ++rank) {
      double pairs = 0;
      for (const std::int64_t query :
           sp::positions(layout, rank, kRanks, kTokens)) {
        for (std::int64_t key = 0; key <= query; ++key) {
          figure.colored_box({left + kCell * static_cast<double>(key),
                              top + 22 + kCell * static_cast<double>(query),
                              kCell - 1, kCell - 1},
                             rank_color(rank));
        }
      }
      for (int step = 0; step < kRanks; ++step) {
        pairs += pairs_in_step(layout, rank, step, kRanks, kTokens);
      }
      const double y = top + 34 + kTokens * kCell + 18 * rank;
      figure.text(left, y + 11, fmt::format("rank {}", rank),
                  Figure::Anchor::kStart, rank_color(rank));
      figure.colored_box({left + 48, y, 1.8 * pairs, kBar}, rank_color(rank));
      figure.text(left + 52 + 1.8 * pairs, y + 11, fmt::format("{:g}", pairs));
    }
  }
  figure.text(0, figure.add_row(18) + 13,
              "bars: pairs of query and key, of 136 together",
              Figure::Anchor::kStart, pictures::kMuted);
  return figure.svg("");
}

double step_s(sp::Kind kind, sp::Layout layout, std::int64_t tokens) {
  Options options =
      on_shapes("dgx-a100", 8,
                fmt::format(R"({{"n_embd": 1024, "n_layer": 4, "n_head": 16, )"
                            R"("vocab_size": 50257, "n_positions": {}}})",
                            tokens),
                1, tokens);
  options.dtype = DType::kBF16;
  options.steps = 2;
  sp::StrategyOptions setup;
  setup.sequence.kind = kind;
  setup.sequence.layout = layout;
  return run_sequence(options, setup).time.step_s;
}

std::string times() {
  std::vector<Value> contiguous, zigzag, ulysses;
  for (std::int64_t tokens = 4096; tokens <= 131072; tokens *= 2) {
    const auto x = static_cast<double>(tokens);
    contiguous.push_back(
        {x, step_s(sp::Kind::kRing, sp::Layout::kContiguous, tokens)});
    zigzag.push_back({x, step_s(sp::Kind::kRing, sp::Layout::kZigzag, tokens)});
    ulysses.push_back(
        {x, step_s(sp::Kind::kUlysses, sp::Layout::kContiguous, tokens)});
  }
  Figure figure(
      "From 16 Ki tokens on, zigzag is faster than contiguous slices\n"
      "A step of 4 blocks of width 1024 in bf16, on 8 A100",
      640);
  const double y = Plot::row(figure, 230);
  Plot plot(figure, {60, y, 440, 230},
            {"tokens of the one sequence", 4096, 131072, {"Ki", 1024}, true},
            {"step", 0.008, 2.048, {"ms", 1e-3}, true});
  plot.curve(contiguous, kOrange, "ring, contiguous");
  plot.curve(zigzag, kBlue, "ring, zigzag");
  plot.curve(ulysses, kGreen, "Ulysses");
  plot.labels();
  return figure.svg("");
}

}  // namespace

std::vector<PageFigure> all() {
  return {{"chapters/12_sequence_parallel/mask.svg", mask},
          {"chapters/12_sequence_parallel/times.svg", times}};
}

}  // namespace shardbook::figures::page_12
