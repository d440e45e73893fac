// Before chapter 01, and in comm/algorithms: what collectives do, step by step,
// and how long they take.

#include <fmt/format.h>

#include <array>
#include <cmath>
#include <functional>

#include "chapters/figures/figures.h"
#include "chapters/figures/pieces.h"
#include "comm/algorithms/halving_doubling.h"
#include "comm/algorithms/ring.h"
#include "comm/algorithms/tree.h"
#include "comm/launch.h"

namespace shardbook::figures::page_collectives {

using algorithms::CostCard;
using algorithms::TreeNode;

Tensor room(std::int64_t pieces) {
  return Tensor::empty({pieces}, {DType::kF64, {}});
}

// Changes x, all pieces of this rank, into y. Other ranks than the root may have
// no x, or no y.
struct Collective {
  const char* name;
  bool from_root, to_root;
  void (*run)(ProcessGroup& world, Tensor& x, Tensor& y);
};

const std::vector<Collective> kCollectives = {
    {"reduce-scatter", false, false,
     [](ProcessGroup& world, Tensor& x, Tensor& y) {
       world.reduce_scatter(y = room(1), x).wait();
     }},
    {"all-gather (of the sums)", false, false,
     [](ProcessGroup& world, Tensor& x, Tensor& y) {
       const Tensor sum = room(1);
       world.reduce_scatter(sum, x).wait();
       world.all_gather(y = room(4), x = sum).wait();
     }},
    {"all-reduce", false, false,
     [](ProcessGroup& world, Tensor& x, Tensor& y) {
       world.all_reduce(y = x.clone()).wait();
     }},
    {"all-to-all", false, false,
     [](ProcessGroup& world, Tensor& x, Tensor& y) {
       world.all_to_all(y = room(4), x).wait();
     }},
    {"broadcast from rank 0", true, false,
     [](ProcessGroup& world, Tensor& x, Tensor& y) {
       world.broadcast(y = x.clone(), 0).wait();
     }},
    {"reduce to rank 0", false, true,
     [](ProcessGroup& world, Tensor& x, Tensor& y) {
       world.reduce(y = x.clone(), 0).wait();
     }},
    {"scatter from rank 0", true, false,
     [](ProcessGroup& world, Tensor& x, Tensor& y) {
       world.scatter(y = room(1), world.rank() == 0 ? x : Tensor(), 0).wait();
     }},
    {"gather to rank 0", false, true,
     [](ProcessGroup& world, Tensor& x, Tensor& y) {
       x = one_piece(world.rank(), world.rank());
       if (world.rank() == 0) y = room(4);
       world.gather(y, x, 0).wait();
     }}};

std::string collectives() {
  constexpr double kLeft = 48, kArrow = 30, kRow = 21;
  constexpr double kPanel = 8 * kPiece + kArrow + 34;
  Figure figure(
      "An all-reduce is a reduce-scatter, then an all-gather\n"
      "A piece has the colour of its rank. A capital letter is a sum over all "
      "ranks. A rank lacks the pale pieces.",
      430);
  double top = 0;
  for (std::size_t i = 0; i < kCollectives.size(); ++i) {
    const Collective& collective = kCollectives[i];
    std::array<Pieces, kPieceRanks> before, after;
    run_ranks(kPieceRanks, [&](ProcessGroup& world) {
      Tensor x = all_pieces(world.rank()), y;
      collective.run(world, x, y);
      const bool is_root = world.rank() == 0;
      if (is_root || !collective.from_root) before[world.rank()] = pieces_of(x);
      if (is_root || !collective.to_root) after[world.rank()] = pieces_of(y);
    });
    if (i % 2 == 0) top = figure.add_row(38 + kPieceRanks * kRow);
    const double left = kLeft + kPanel * (i % 2);
    figure.text(left, top + 18, collective.name);
    for (int rank = 0; rank < kPieceRanks; ++rank) {
      const double y = top + 26 + kRow * rank;
      if (i % 2 == 0) figure.rank_name(0, y + 13, rank);
      draw_pieces(figure, before[rank], left, y);
      draw_pieces(figure, after[rank], left + 4 * kPiece + kArrow, y);
    }
    const double middle = top + 26 + kRow * kPieceRanks / 2 - 2;
    figure.thick_arrow({left + 4 * kPiece + 5, middle},
                       {left + 4 * kPiece + kArrow - 6, middle});
  }
  return figure.svg();
}

std::string ring() {
  Figure figure(
      "In each ring step, every rank sends one piece\n"
      "Each picture is the state before the step. A piece has a stripe for "
      "each rank that it sums; the one with a border is sent. Below: the "
      "bytes that each rank has sent so far.",
      440);
  draw_frames(figure, frames_of([](ProcessGroup& group, const Tensor& tensor) {
                algorithms::ring_all_reduce(group, tensor);
              }),
              {"ring step 1: add", "ring step 2: add", "ring step 3: add",
               "ring step 4: copy", "ring step 5: copy", "ring step 6: copy",
               "end: all sums"});
  return figure.svg();
}

std::string halving() {
  Figure figure(
      "Halving and doubling: log2 P swaps add, as many copy\n"
      "Each picture is the state before the swaps. A piece has a stripe for "
      "each rank that it sums; those with a border are sent.",
      440);
  draw_frames(figure, frames_of([](ProcessGroup& group, const Tensor& tensor) {
                algorithms::halving_doubling_all_reduce(group, tensor);
              }),
              {"1: add halves", "2: add quarters", "3: copy quarters",
               "4: copy halves", "end: all sums"});
  return figure.svg();
}

CostCard reduce_and_broadcast(int ranks, std::int64_t n) {
  CostCard up = algorithms::tree_reduce_cost(ranks, n);
  const CostCard down = algorithms::tree_broadcast_cost(ranks, n);
  up.steps += down.steps;
  up.chain_elements += down.chain_elements;
  return up;
}

std::string time_text(double s) {
  return s < 1e-3 ? fmt::format("{:.0f} µs", 1e6 * s)
                  : fmt::format("{:g} ms", 1e3 * s);
}

std::string latency() {
  constexpr int kRanks = 8;
  constexpr double kAlpha = 1e-5, kBeta = 1e10, kLeast = 1e3, kMost = 32e6;
  const auto at = [&](const auto& cost, double bytes) {
    return Value{bytes, cost(kRanks, bytes).seconds(kAlpha, kBeta, 1)};
  };
  std::vector<Value> ring, tree;
  for (double bytes = kLeast; bytes <= kMost; bytes *= 1.25) {
    const double pieces = std::round(bytes / kRanks) * kRanks;
    ring.push_back(at(algorithms::ring_all_reduce_cost, pieces));
    tree.push_back(at(reduce_and_broadcast, pieces));
  }
  const auto size = [](double bytes) {
    return bytes < 1e6 ? fmt::format("{:g} KB", bytes / 1e3)
                       : fmt::format("{:g} MB", bytes / 1e6);
  };
  Plot plot("Below 188 KB a tree is faster, above it a ring",
            {56, 340, 250, 440},
            {"bytes of the tensor, n",
             kLeast,
             kMost,
             {"KB", 1e3},
             true,
             {1e3, 1e4, 1e5, 1e6, 1e7},
             size},
            {"time of an all-reduce: 8 ranks, 10 µs, 10 GB/s",
             2e-5,
             0.03,
             kMilliseconds,
             true,
             {1e-4, 1e-3, 1e-2},
             time_text});
  plot.curve(ring, kBlue, "ring");
  plot.curve(tree, kOrange, "tree");
  using Anchor = Figure::Anchor;
  const auto point = [&](const Value& value, const std::string& before,
                         const Stroke& stroke, const Point& by,
                         Anchor anchor = Anchor::kStart) {
    plot.dots({value}, stroke);
    plot.text(value.x, value.y, before + time_text(value.y), stroke, by,
              anchor);
  };
  point(at(algorithms::ring_all_reduce_cost, 1e3), "", kBlue, {4, -8});
  point(at(reduce_and_broadcast, 1e3), "", kOrange, {4, 18});
  point(at(algorithms::ring_all_reduce_cost, 1e6), "", kBlue, {6, 14});
  point(at(reduce_and_broadcast, 1e6), "", kOrange, {-6, -6}, Anchor::kEnd);
  // 14 a + 14/8 n/b = 6 a + 6 n/b
  const double crossing = 8 / 4.25 * kAlpha * kBeta;
  const double both = 6 * (kAlpha + crossing / kBeta);
  point({crossing, both}, fmt::format("{:.0f} KB: ", crossing / 1e3), kBlack,
        {-6, -12}, Anchor::kEnd);
  return plot.svg();
}

void draw_tree(Figure& figure, const std::vector<TreeNode>& tree, double left,
               double top) {
  constexpr double kColumn = 38, kLevel = 48, kRadius = 12;
  // In order: the first child, the rank, the other children
  std::vector<Point> at(tree.size());
  int column = 0;
  const std::function<void(int, int)> place = [&](int rank, int level) {
    std::vector<int> children = tree[rank].children;
    if (children.size() > 1) {
      place(children[0], level + 1);
      children.erase(children.begin());
    }
    at[rank] = {left + kColumn * (column++ + 0.5),
                top + kLevel * level + kRadius};
    for (const int child : children) place(child, level + 1);
  };
  const int ranks = static_cast<int>(tree.size());
  for (int rank = 0; rank < ranks; ++rank) {
    if (tree[rank].parent < 0) place(rank, 0);
  }
  for (int rank = 0; rank < ranks; ++rank) {
    if (tree[rank].parent < 0) continue;
    figure.line({at[rank], at[tree[rank].parent]}, kMuted, 1.5);
  }
  for (int rank = 0; rank < ranks; ++rank) {
    const auto [x, y] = at[rank];
    // Inner ranks are squares with a border, leaves have none
    figure.framed_box({x - kRadius, y - kRadius, 2 * kRadius, 2 * kRadius},
                      rank_color(rank),
                      tree[rank].children.empty() ? "" : kInk);
    figure.middle(x, y + 4, std::to_string(rank), kWhite);
  }
}

std::string trees() {
  Figure figure("A leaf of one tree is an inner rank of the other");
  const double y = figure.add_row(26 + 4 * 48) + 14;
  figure.text(0, y, "first half of the vector");
  draw_tree(figure, algorithms::first_tree(8), 0, y + 12);
  figure.text(330, y, "second half of the vector");
  draw_tree(figure, algorithms::second_tree(8), 330, y + 12);
  return figure.svg();
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
  constexpr double kKiB = 1 << 10, kMiB = 1 << 20, kPanel = 158, kGap = 12;
  Figure figure(
      "On 64 ranks a ring needs 1.3 ms for any message below 1 MB\n"
      "Time of an all-reduce; latency 10 µs, 10 GB/s");
  const auto no_text = [](double) { return std::string(); };
  const auto size = [](double bytes) {
    return round_text(bytes, bytes_unit(bytes));
  };
  Axis x = logarithmic("bytes", kKiB, 64 * kMiB, {kKiB, 32 * kKiB, kMiB}, size);
  Axis y = logarithmic("", 3e-5, 0.1, {1e-4, 1e-3, 1e-2, 1e-1}, time_text);
  Box at = {52, Plot::row(figure, 240), kPanel, 240};
  for (const int ranks : {6, 8, 64}) {
    y.name = fmt::format("{} ranks", ranks);
    Plot plot(figure, at, x, y);
    for (const Algorithm& one : all) {
      std::vector<Value> values;
      for (double bytes = kKiB; bytes <= 64 * kMiB; bytes *= std::sqrt(2)) {
        const CostCard card = one.cost(ranks, bytes / 4);
        values.push_back({bytes, card.seconds(1e-5, 1e10, 4)});
      }
      plot.curve(values, one.stroke, ranks == 64 ? one.name : "");
    }
    plot.labels();
    at.x += kPanel + kGap;
    y.text = no_text;  // the first one's are all plots'
  }
  return figure.svg();
}

std::vector<PageFigure> all() {
  return {{"chapters/before_collectives.svg", collectives},
          {"chapters/before_ring.svg", ring},
          {"chapters/before_latency.svg", latency},
          {"comm/algorithms/halving.svg", halving},
          {"comm/algorithms/trees.svg", trees},
          {"comm/algorithms/times.svg", times}};
}

}  // namespace shardbook::figures::page_collectives
