// Before chapter 01: collectives, a ring, latency and bandwidth.

#include <fmt/format.h>

#include <functional>

#include "chapters/figures/pages.h"
#include "chapters/figures/pieces.h"
#include "chapters/figures/plot.h"
#include "chapters/figures/ranks.h"
#include "comm/algorithms/ring.h"
#include "comm/algorithms/tree.h"
#include "comm/launch.h"

namespace shardbook::figures::page_before {
namespace {

using pictures::Figure;

// A collective on this rank: its tensor before, and after.
using BeforeAndAfter = std::pair<Pieces, Pieces>;
struct Collective {
  const char* name;
  BeforeAndAfter (*run)(ProcessGroup& world);
};

Tensor room(std::int64_t pieces) {
  return Tensor::empty({pieces}, {DType::kF64, {}});
}

// Of rank 0 alone
Pieces on_root(ProcessGroup& world, const Tensor& tensor) {
  return world.rank() == 0 ? pieces_of(tensor) : Pieces{};
}

const std::vector<Collective> kCollectives = {
    {"all-reduce",
     [](ProcessGroup& world) -> BeforeAndAfter {
       const Tensor x = all_pieces(world.rank());
       const Pieces before = pieces_of(x);
       world.all_reduce(x).wait();
       return {before, pieces_of(x)};
     }},
    {"reduce-scatter",
     [](ProcessGroup& world) -> BeforeAndAfter {
       const Tensor x = all_pieces(world.rank()), y = room(1);
       world.reduce_scatter(y, x).wait();
       return {pieces_of(x), pieces_of(y)};
     }},
    {"all-gather",
     [](ProcessGroup& world) -> BeforeAndAfter {
       const Tensor x = one_piece(world.rank(), world.rank()), y = room(4);
       world.all_gather(y, x).wait();
       return {pieces_of(x), pieces_of(y)};
     }},
    {"all-to-all",
     [](ProcessGroup& world) -> BeforeAndAfter {
       const Tensor x = all_pieces(world.rank()), y = room(4);
       world.all_to_all(y, x).wait();
       return {pieces_of(x), pieces_of(y)};
     }},
    {"reduce to 0",
     [](ProcessGroup& world) -> BeforeAndAfter {
       const Tensor x = all_pieces(world.rank());
       const Pieces before = pieces_of(x);
       world.reduce(x, 0).wait();
       return {before, on_root(world, x)};
     }},
    {"broadcast from 0",
     [](ProcessGroup& world) -> BeforeAndAfter {
       const Tensor x = all_pieces(world.rank());
       const Pieces before = on_root(world, x);
       world.broadcast(x, 0).wait();
       return {before, pieces_of(x)};
     }},
    {"scatter from 0",
     [](ProcessGroup& world) -> BeforeAndAfter {
       const bool is_root = world.rank() == 0;
       const Tensor x = is_root ? all_pieces(0) : Tensor(), y = room(1);
       world.scatter(y, x, 0).wait();
       return {is_root ? pieces_of(x) : Pieces{}, pieces_of(y)};
     }},
    {"gather to 0", [](ProcessGroup& world) -> BeforeAndAfter {
       const bool is_root = world.rank() == 0;
       const Tensor x = one_piece(world.rank(), world.rank());
       const Tensor y = is_root ? room(4) : Tensor();
       world.gather(y, x, 0).wait();
       return {pieces_of(x), is_root ? pieces_of(y) : Pieces{}};
     }}};

std::string collectives() {
  constexpr double kLeft = 50, kPanel = 150, kRow = 24;
  Figure figure(
      "An all-reduce is a reduce-scatter and an all-gather\n"
      "A piece has the colour of its rank. Capital letters are sums over all "
      "ranks.",
      640);
  double top = 0;
  for (std::size_t i = 0; i < kCollectives.size(); ++i) {
    std::vector<BeforeAndAfter> ranks(kPieceRanks);
    run_ranks(kPieceRanks, [&](ProcessGroup& world) {
      ranks[static_cast<std::size_t>(world.rank())] =
          kCollectives[i].run(world);
    });
    if (i % 4 == 0) top = figure.add_row(32 + kPieceRanks * kRow);
    const double left = kLeft + kPanel * static_cast<double>(i % 4);
    figure.text(left, top + 18, kCollectives[i].name);
    for (int rank = 0; rank < kPieceRanks; ++rank) {
      const double y = top + 26 + kRow * rank;
      const auto& [before, after] = ranks[static_cast<std::size_t>(rank)];
      if (i % 4 == 0) {
        figure.text(0, y + 12, fmt::format("rank {}", rank),
                    Figure::Anchor::kStart, rank_color(rank));
      }
      draw_pieces(figure, before, left, y);
      figure.text(left + 4 * kPiece + 5, y + 12, "→", Figure::Anchor::kMiddle,
                  pictures::kMuted);
      draw_pieces(figure, after, left + 4 * kPiece + 12, y);
    }
  }
  return figure.svg("");
}

std::string ring() {
  const std::vector<Frame> frames =
      frames_of([](ProcessGroup& group, const Tensor& tensor) {
        algorithms::ring_all_reduce(group, tensor);
      });
  std::vector<std::string> titles;
  for (int step = 1; step <= 6; ++step) {
    titles.push_back(fmt::format("{}: {}", step,
                                 step <= 3 ? "send and add" : "send and copy"));
  }
  titles.emplace_back("all ranks have all sums");
  Figure figure(
      "2(P - 1) steps, one piece per step: every link is always busy\n"
      "A piece has a stripe for each rank that it sums; the one with a border "
      "is sent.",
      640);
  draw_frames(figure, frames, titles);
  return figure.svg("");
}

std::string latency() {
  constexpr int kRanks = 8;
  constexpr double kAlpha = 1e-5, kBeta = 1e10, kLeast = 1e3, kMost = 64e6;
  std::vector<Value> ring, tree, wire;
  for (double bytes = kLeast; bytes <= kMost; bytes *= 1.25) {
    const auto n = static_cast<std::int64_t>(bytes / kRanks) * kRanks;
    const auto seconds = [&](const algorithms::CostCard& card) {
      return card.seconds(kAlpha, kBeta, 1);
    };
    const auto x = static_cast<double>(n);
    ring.push_back({x, seconds(algorithms::ring_all_reduce_cost(kRanks, n))});
    tree.push_back(
        {x, seconds(algorithms::tree_reduce_cost(kRanks, n)) +
                seconds(algorithms::tree_broadcast_cost(kRanks, n))});
    if (x / kBeta >= 1e-5) wire.push_back({x, x / kBeta});
  }
  Figure figure("Below 188 KB a tree is faster than a ring, above it the ring",
                640);
  const double y = Plot::row(figure, 260);
  Plot plot(figure, {60, y, 510, 260},
            {"bytes of the tensor",
             kLeast,
             kMost,
             {},
             true,
             {1e3, 1e4, 1e5, 1e6, 1e7},
             [](double bytes) {
               return bytes < 1e6 ? fmt::format("{:g} KB", bytes / 1e3)
                                  : fmt::format("{:g} MB", bytes / 1e6);
             }},
            {"all-reduce over 8 ranks; latency 10 µs, 10 GB/s",
             1e-5,
             0.1,
             {},
             true,
             {1e-5, 1e-4, 1e-3, 1e-2, 1e-1},
             [](double s) {
               return s < 1e-3 ? fmt::format("{:g} µs", 1e6 * s)
                               : fmt::format("{:g} ms", 1e3 * s);
             }});
  plot.curve(wire, kGray, "n/β");
  plot.curve(ring, kBlue, "ring");
  plot.curve(tree, kOrange, "tree");
  // 14 a + 14/8 n/b = 6 a + 6 n/b
  const double crossing = 8 / 4.25 * kAlpha * kBeta;
  const double both = 6 * (kAlpha + crossing / kBeta);
  figure.dot(plot.at(crossing, both), pictures::kInk);
  const auto text = [&](double x, double seconds, const std::string& words,
                        Figure::Anchor anchor) {
    const pictures::Point at = plot.at(x, seconds);
    figure.text(at.x, at.y, words, anchor);
  };
  text(
      crossing / 1.1, both * 1.9,
      fmt::format("{:.0f} KB: both take {:.0f} µs", crossing / 1e3, both * 1e6),
      Figure::Anchor::kEnd);
  const double knee = kRanks * kAlpha * kBeta;
  const double at_knee = 28 * kAlpha;
  figure.dot(plot.at(knee, at_knee), kBlue.color);
  figure.line({plot.at(knee, at_knee), plot.at(knee, 2.6e-5)}, kBlue.color);
  text(knee, 1.8e-5, "800 KB: half of the ring's time is latency",
       Figure::Anchor::kStart);
  plot.labels();
  return figure.svg("");
}

}  // namespace

std::vector<PageFigure> all() {
  return {{"chapters/before_collectives.svg", collectives},
          {"chapters/before_ring.svg", ring},
          {"chapters/before_latency.svg", latency}};
}

}  // namespace shardbook::figures::page_before
