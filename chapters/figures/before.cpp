// Before chapter 01: collectives, a ring, latency and bandwidth.

#include <fmt/format.h>

#include <cmath>

#include "chapters/figures/pages.h"
#include "chapters/figures/pieces.h"
#include "comm/algorithms/ring.h"
#include "comm/algorithms/tree.h"
#include "comm/launch.h"

namespace shardbook::figures::page_before {
namespace {

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
    {"reduce-scatter",
     [](ProcessGroup& world) -> BeforeAndAfter {
       const Tensor x = all_pieces(world.rank()), y = room(1);
       world.reduce_scatter(y, x).wait();
       return {pieces_of(x), pieces_of(y)};
     }},
    {"all-gather (of the sums)",
     [](ProcessGroup& world) -> BeforeAndAfter {
       const Tensor sum = room(1), y = room(4);
       world.reduce_scatter(sum, all_pieces(world.rank())).wait();
       world.all_gather(y, sum).wait();
       return {pieces_of(sum), pieces_of(y)};
     }},
    {"all-reduce",
     [](ProcessGroup& world) -> BeforeAndAfter {
       const Tensor x = all_pieces(world.rank());
       const Pieces before = pieces_of(x);
       world.all_reduce(x).wait();
       return {before, pieces_of(x)};
     }},
    {"all-to-all",
     [](ProcessGroup& world) -> BeforeAndAfter {
       const Tensor x = all_pieces(world.rank()), y = room(4);
       world.all_to_all(y, x).wait();
       return {pieces_of(x), pieces_of(y)};
     }},
    {"broadcast from rank 0",
     [](ProcessGroup& world) -> BeforeAndAfter {
       const Tensor x = all_pieces(world.rank());
       const Pieces before = on_root(world, x);
       world.broadcast(x, 0).wait();
       return {before, pieces_of(x)};
     }},
    {"reduce to rank 0",
     [](ProcessGroup& world) -> BeforeAndAfter {
       const Tensor x = all_pieces(world.rank());
       const Pieces before = pieces_of(x);
       world.reduce(x, 0).wait();
       return {before, on_root(world, x)};
     }},
    {"scatter from rank 0",
     [](ProcessGroup& world) -> BeforeAndAfter {
       const bool is_root = world.rank() == 0;
       const Tensor x = is_root ? all_pieces(0) : Tensor(), y = room(1);
       world.scatter(y, x, 0).wait();
       return {is_root ? pieces_of(x) : Pieces{}, pieces_of(y)};
     }},
    {"gather to rank 0", [](ProcessGroup& world) -> BeforeAndAfter {
       const bool is_root = world.rank() == 0;
       const Tensor x = one_piece(world.rank(), world.rank());
       const Tensor y = is_root ? room(4) : Tensor();
       world.gather(y, x, 0).wait();
       return {pieces_of(x), is_root ? pieces_of(y) : Pieces{}};
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
    std::vector<BeforeAndAfter> ranks(kPieceRanks);
    run_ranks(kPieceRanks, [&](ProcessGroup& world) {
      ranks[static_cast<std::size_t>(world.rank())] =
          kCollectives[i].run(world);
    });
    if (i % 2 == 0) top = figure.add_row(38 + kPieceRanks * kRow);
    const double left = kLeft + kPanel * static_cast<double>(i % 2);
    figure.text(left, top + 18, kCollectives[i].name);
    for (int rank = 0; rank < kPieceRanks; ++rank) {
      const double y = top + 26 + kRow * rank;
      const auto& [before, after] = ranks[static_cast<std::size_t>(rank)];
      if (i % 2 == 0) rank_name(figure, 0, y + 13, rank);
      draw_pieces(figure, before, left, y);
      draw_pieces(figure, after, left + 4 * kPiece + kArrow, y);
    }
    const double middle = top + 26 + kRow * kPieceRanks / 2 - 2;
    thick_arrow(figure, {left + 4 * kPiece + 5, middle},
                {left + 4 * kPiece + kArrow - 6, middle});
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
    titles.push_back(
        fmt::format("ring step {}: {}", step, step <= 3 ? "add" : "copy"));
  }
  titles.emplace_back("end: all sums");
  Figure figure(
      "In each ring step, every rank sends one piece\n"
      "Each picture is the state before the step. A piece has a stripe for "
      "each rank that it sums; the one with a border is sent. Below: the "
      "bytes that each rank has sent so far.",
      440);
  draw_frames(figure, frames, titles);
  return figure.svg("");
}

std::string latency() {
  constexpr int kRanks = 8;
  constexpr double kAlpha = 1e-5, kBeta = 1e10, kLeast = 1e3, kMost = 32e6;
  const auto seconds = [](const algorithms::CostCard& card) {
    return card.seconds(kAlpha, kBeta, 1);
  };
  const auto ring_at = [&](double bytes) {
    const auto n = static_cast<std::int64_t>(bytes);
    return Value{bytes, seconds(algorithms::ring_all_reduce_cost(kRanks, n))};
  };
  const auto tree_at = [&](double bytes) {
    const auto n = static_cast<std::int64_t>(bytes);
    return Value{bytes,
                 seconds(algorithms::tree_reduce_cost(kRanks, n)) +
                     seconds(algorithms::tree_broadcast_cost(kRanks, n))};
  };
  std::vector<Value> ring, tree;
  for (double bytes = kLeast; bytes <= kMost; bytes *= 1.25) {
    const double pieces = std::round(bytes / kRanks) * kRanks;
    ring.push_back(ring_at(pieces));
    tree.push_back(tree_at(pieces));
  }
  Figure figure("Below 188 KB a tree is faster, above it a ring", 440);
  const auto time = [](double s) {
    return s < 1e-3 ? fmt::format("{:.0f} µs", 1e6 * s)
                    : fmt::format("{:g} ms", 1e3 * s);
  };
  const auto size = [](double bytes) {
    return bytes < 1e6 ? fmt::format("{:g} KB", bytes / 1e3)
                       : fmt::format("{:g} MB", bytes / 1e6);
  };
  Plot plot(figure, PlotSize{56, 340, 250},
            logarithmic("bytes of the tensor, n", kLeast, kMost,
                        {1e3, 1e4, 1e5, 1e6, 1e7}, size),
            logarithmic("time of an all-reduce: 8 ranks, 10 µs, 10 GB/s", 2e-5,
                        0.03, {1e-4, 1e-3, 1e-2}, time));
  plot.curve(ring, kBlue, "ring");
  plot.curve(tree, kOrange, "tree");
  using Anchor = Figure::Anchor;
  const auto point = [&](const Value& value, const std::string& before,
                         const Stroke& stroke, const Point& by,
                         Anchor anchor = Anchor::kStart) {
    plot.dots({value}, stroke);
    plot.text(value.x, value.y, before + time(value.y), stroke, anchor, by);
  };
  point(ring_at(1e3), "", kBlue, {4, -8});
  point(tree_at(1e3), "", kOrange, {4, 18});
  point(ring_at(1e6), "", kBlue, {6, 14});
  point(tree_at(1e6), "", kOrange, {-6, -6}, Anchor::kEnd);
  // 14 a + 14/8 n/b = 6 a + 6 n/b
  const double crossing = 8 / 4.25 * kAlpha * kBeta;
  const double both = 6 * (kAlpha + crossing / kBeta);
  point({crossing, both}, fmt::format("{:.0f} KB: ", crossing / 1e3),
        {kInk, ""}, {-6, -12}, Anchor::kEnd);
  return plot.svg();
}

}  // namespace

std::vector<PageFigure> all() {
  return {{"chapters/before_collectives.svg", collectives},
          {"chapters/before_ring.svg", ring},
          {"chapters/before_latency.svg", latency}};
}

}  // namespace shardbook::figures::page_before
