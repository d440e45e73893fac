// How collectives work, which continues the page before chapter 01.

#include <fmt/format.h>

#include <array>
#include <cmath>
#include <functional>

#include "chapters/figures/pages.h"
#include "chapters/figures/pieces.h"
#include "comm/algorithms/halving_doubling.h"
#include "comm/algorithms/ring.h"
#include "comm/algorithms/tree.h"

namespace shardbook::figures::page_algorithms {
namespace {

using algorithms::CostCard;
using algorithms::TreeNode;

std::string halving() {
  const std::vector<Frame> frames =
      frames_of([](ProcessGroup& group, const Tensor& tensor) {
        algorithms::halving_doubling_all_reduce(group, tensor);
      });
  Figure figure(
      "Halving and doubling: log2 P swaps add, as many copy\n"
      "Each picture is the state before the swaps. A piece has a stripe for "
      "each rank that it sums; those with a border are sent.",
      440);
  draw_frames(figure, frames,
              {"1: add halves", "2: add quarters", "3: copy quarters",
               "4: copy halves", "end: all sums"});
  return figure.svg("");
}

void draw_tree(Figure& figure, const std::vector<TreeNode>& tree, double left,
               double top) {
  constexpr double kColumn = 38, kLevel = 48, kRadius = 12;
  // In order: the first child, the rank, the other children
  std::vector<Point> at(tree.size());
  int column = 0;
  const std::function<void(int, int)> place = [&](int rank, int level) {
    const auto i = static_cast<std::size_t>(rank);
    const std::vector<int>& children = tree[i].children;
    if (children.size() > 1) place(children[0], level + 1);
    at[i] = {left + kColumn * (column++ + 0.5), top + kLevel * level + kRadius};
    for (std::size_t c = children.size() > 1 ? 1 : 0; c < children.size();
         ++c) {
      place(children[c], level + 1);
    }
  };
  for (std::size_t rank = 0; rank < tree.size(); ++rank) {
    if (tree[rank].parent < 0) place(static_cast<int>(rank), 0);
  }
  for (std::size_t rank = 0; rank < tree.size(); ++rank) {
    if (tree[rank].parent < 0) continue;
    figure.line({at[rank], at[static_cast<std::size_t>(tree[rank].parent)]},
                kMuted, 1.5);
  }
  for (std::size_t rank = 0; rank < tree.size(); ++rank) {
    const auto [x, y] = at[rank];
    // Inner ranks are squares with a border, leaves have none
    figure.colored_box({x - kRadius, y - kRadius, 2 * kRadius, 2 * kRadius},
                       rank_color(static_cast<int>(rank)),
                       tree[rank].children.empty() ? "" : kInk);
    figure.middle(x, y + 4, std::to_string(rank), kWhite);
  }
}

std::string trees() {
  Figure figure("A leaf of one tree is an inner rank of the other");
  const double y = figure.add_row(26 + 4 * 48) + 14;
  const std::array<std::vector<TreeNode>, 2> both = {
      algorithms::first_tree(8), algorithms::second_tree(8)};
  for (std::size_t i = 0; i < 2; ++i) {
    const double left = 330 * static_cast<double>(i);
    figure.text(
        left, y,
        i == 0 ? "first half of the vector" : "second half of the vector");
    draw_tree(figure, both[i], left, y + 12);
  }
  return figure.svg("");
}

CostCard reduce_and_broadcast(int ranks, std::int64_t n) {
  CostCard up = algorithms::tree_reduce_cost(ranks, n);
  const CostCard down = algorithms::tree_broadcast_cost(ranks, n);
  up.steps += down.steps;
  up.chain_elements += down.chain_elements;
  return up;
}

std::string times() {
  struct Algorithm {
    const char* name;
    Stroke stroke;
    std::function<CostCard(int ranks, std::int64_t n)> cost;
  };
  const std::vector<Algorithm> all = {
      {"ring", kBlue, algorithms::ring_all_reduce_cost},
      {"halving", kGreen, algorithms::halving_doubling_all_reduce_cost},
      {"double tree", kPurple,
       [](int ranks, std::int64_t n) {
         return algorithms::double_tree_all_reduce_cost(ranks, n);
       }},
      {"tree", kOrange, reduce_and_broadcast}};
  constexpr double kLeft = 52, kPanel = 158, kGap = 12;
  Figure figure(
      "On 64 ranks a ring needs 1.3 ms for any message below 1 MB\n"
      "Time of an all-reduce; latency 10 µs, 10 GB/s");
  const double y = Plot::row(figure, 240);
  constexpr std::array<int, 3> kRanks = {6, 8, 64};
  for (std::size_t i = 0; i < kRanks.size(); ++i) {
    const std::function no_text = [](double) { return std::string(); };
    const std::function time = [](double s) {
      return s < 1e-3 ? fmt::format("{:g} µs", 1e6 * s)
                      : fmt::format("{:g} ms", 1e3 * s);
    };
    const auto size = [](double bytes) {
      return bytes < 1 << 20 ? fmt::format("{:g} KiB", bytes / (1 << 10))
                             : fmt::format("{:g} MiB", bytes / (1 << 20));
    };
    const double left = kLeft + (kPanel + kGap) * static_cast<double>(i);
    Plot plot(figure, Box{left, y, kPanel, 240},
              logarithmic("bytes", 1 << 10, 64 << 20,
                          {1 << 10, 1 << 15, 1 << 20}, size),
              logarithmic(fmt::format("{} ranks", kRanks[i]), 3e-5, 0.1,
                          {1e-4, 1e-3, 1e-2, 1e-1}, i == 0 ? time : no_text));
    for (const Algorithm& one : all) {
      std::vector<Value> values;
      for (double bytes = 1 << 10; bytes <= 64 << 20; bytes *= std::sqrt(2)) {
        const CostCard card =
            one.cost(kRanks[i], static_cast<std::int64_t>(bytes / 4));
        values.push_back({bytes, card.seconds(1e-5, 1e10, 4)});
      }
      plot.curve(values, one.stroke, i == 2 ? one.name : "");
    }
    plot.labels();
  }
  return figure.svg("");
}

}  // namespace

std::vector<PageFigure> all() {
  return {{"comm/algorithms/halving.svg", halving},
          {"comm/algorithms/trees.svg", trees},
          {"comm/algorithms/times.svg", times}};
}

}  // namespace shardbook::figures::page_algorithms
