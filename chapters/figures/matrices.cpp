// Products of matrices that lie on squares and cubes of ranks.

#include <fmt/format.h>

#include <set>

#include "chapters/08_tensor_parallel_2d/bill.h"
#include "chapters/08_tensor_parallel_2d/products.h"
#include "chapters/10_tensor_parallel_3d/cube.h"
#include "chapters/figures/pages.h"
#include "chapters/figures/plot.h"
#include "chapters/figures/ranks.h"
#include "chapters/figures/shapes.h"
#include "comm/device_mesh.h"
#include "comm/launch.h"

namespace shardbook::figures::page_08 {
namespace {

using pictures::Figure;
using Blocks = std::set<std::pair<int, int>>;

// The blocks of A and B that travel in each step of a product on q x q ranks.
struct Travels {
  std::vector<Blocks> a, b;
};

Travels travels_of(int q) {
  std::vector<std::vector<CommRecord>> ranks(static_cast<std::size_t>(q * q));
  run_ranks(q * q, [&](ProcessGroup& world) {
    DeviceMesh mesh(world, summa::square(q));
    const Tensor block = Tensor::full({1, 1}, 1);
    world.clear_records();
    summa::multiply_ab(block, block, summa::grid_of(mesh));
    ranks[static_cast<std::size_t>(world.rank())] = world.records();
  });
  Travels travels;
  travels.a.resize(static_cast<std::size_t>(q));
  travels.b.resize(static_cast<std::size_t>(q));
  for (int rank = 0; rank < q * q; ++rank) {
    const summa::Place place = summa::place_of(rank, q);
    std::size_t rows = 0, columns = 0;
    for (const CommRecord& record : ranks[static_cast<std::size_t>(rank)]) {
      if (record.group == "row") {
        travels.a[rows++].insert({place.i, record.root_or_peer});
      } else if (record.group == "col") {
        travels.b[columns++].insert({record.root_or_peer, place.j});
      }
    }
  }
  return travels;
}

std::string frames() {
  constexpr int kSide = 3;
  constexpr double kCell = 22, kGrid = kSide * kCell;
  const Travels travels = travels_of(kSide);
  Figure figure(
      "In step k, column k of X goes along rows, row k of W along columns\n"
      "9 ranks; the blocks that travel are purple, what Y has is dark.",
      640);
  for (int t = 0; t < kSide; ++t) {
    const double y = figure.add_row(kGrid + 40) + 26;
    figure.text(0, y + kGrid / 2 + 4, fmt::format("k = {}", t));
    const auto grid = [&](double left, const char* name, const Blocks& moved) {
      figure.text(left + kGrid / 2, y - 8, name, Figure::Anchor::kMiddle);
      for (int i = 0; i < kSide; ++i) {
        for (int j = 0; j < kSide; ++j) {
          figure.box({left + kCell * j, y + kCell * i, kCell - 2, kCell - 2},
                     moved.count({i, j}) > 0 ? "comm" : "empty");
        }
      }
    };
    const auto step = static_cast<std::size_t>(t);
    grid(70, "X", travels.a[step]);
    grid(230, "W", travels.b[step]);
    for (int i = 0; i < kSide; ++i) {
      const double middle = y + kCell * (i + 0.5) - 1;
      arrow(figure, {140, middle}, {172, middle}, pictures::color_of("comm"));
      const double x = 230 + kCell * (i + 0.5) - 1;
      arrow(figure, {x, y + kGrid}, {x, y + kGrid + 10},
            pictures::color_of("comm"));
    }
    figure.text(390, y - 8, "Y, a term more", Figure::Anchor::kStart);
    for (int i = 0; i < kSide; ++i) {
      for (int j = 0; j < kSide; ++j) {
        const double x = 390 + 1.4 * kCell * j;
        for (int term = 0; term < kSide; ++term) {
          const pictures::Box at{x + 9 * term, y + kCell * i, 8, kCell - 2};
          if (term <= t) {
            figure.colored_box(at, pictures::kInk);
          } else {
            figure.box(at, "empty");
          }
        }
      }
    }
    figure.text(500, y + kGrid / 2 + 4, fmt::format("X(i, {0}) W({0}, j)", t));
  }
  return figure.svg("");
}

// Sent by a rank for the products of a block of width h, forward and backward,
// in units of h^2.
double sent(double q, double d, double tokens_over_h) {
  const double x = tokens_over_h;
  return summa::linear_elements(q, d, x, 1, 3) +
         summa::linear_elements(q, d, x, 1, 1) +
         summa::linear_elements(q, d, x, 1, 4) +
         summa::linear_elements(q, d, x, 4, 1);
}

std::string sizes() {
  std::vector<Value> one, two;
  for (double x = 0.25; x <= 64; x *= 2) {
    one.push_back({x, 8 * 63.0 / 64 * x});  // four all-reduces of T h
    two.push_back({x, sent(8, 1, x)});
  }
  Figure figure(
      "On 64 ranks, 2D sends less than 1D from one token per unit of width on\n"
      "Products of a block, forward and backward",
      640);
  const double y = Plot::row(figure, 230);
  Plot plot(figure, {50, y, 460, 230},
            {"tokens over the width h", 0.25, 64, {}, true},
            {"elements sent by a rank, over h²", 1, 512, {}, true});
  plot.curve(one, kOrange, "1D");
  plot.curve(two, kBlue, "2D, 8 x 8");
  plot.labels();
  return figure.svg("");
}

}  // namespace

std::vector<PageFigure> all() {
  return {{"chapters/08_tensor_parallel_2d/frames.svg", frames},
          {"chapters/08_tensor_parallel_2d/sizes.svg", sizes}};
}

}  // namespace shardbook::figures::page_08
