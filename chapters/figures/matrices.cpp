// Products of matrices that lie on squares and cubes of ranks.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "chapters/08_tensor_parallel_2d/bill.h"
#include "chapters/09_tensor_parallel_2p5d/tesseract.h"
#include "chapters/figures/pages.h"
#include "chapters/figures/plot.h"
#include "chapters/figures/ranks.h"
#include "chapters/figures/shapes.h"
#include "comm/device_mesh.h"
#include "comm/launch.h"

namespace shardbook::figures::page_09 {
namespace {

using pictures::Figure;
using pictures::Point;

std::string squares() {
  constexpr int kSide = 2, kDepth = 2;
  constexpr double kCell = 80, kSlant = 34, kHeight = 34, kLevel = 108;
  const Topology topology = tesseract::squares(kSide, kDepth);
  Figure figure(
      "Each square has its own rows of the batch and the same weights\n"
      "8 ranks: d = 2 squares of q x q = 2 x 2. A colour is a block of W.",
      640);
  const double top = figure.add_row(kDepth * kLevel + 20) + 10;
  const auto corner = [&](double i, double j, int k) {
    return Point{60 + kCell * j + kSlant * (kSide - i),
                 top + kLevel * (kDepth - 1 - k) + kHeight * i};
  };
  for (int k = 0; k < kDepth; ++k) {
    for (int i = 0; i < kSide; ++i) {
      for (int j = 0; j < kSide; ++j) {
        const int rank =
            topology.get_rank({{"dep", k}, {"col", i}, {"row", j}});
        const Point a = corner(i, j, k), b = corner(i, j + 1, k);
        const Point c = corner(i + 1, j + 1, k), d = corner(i + 1, j, k);
        const auto px = pictures::px;
        figure.colored_path(
            fmt::format("M{} {}L{} {}L{} {}L{} {}z", px(a.x), px(a.y), px(b.x),
                        px(b.y), px(c.x), px(c.y), px(d.x), px(d.y)),
            rank_color(kSide * i + j));
        figure.line({a, b, c, d, a}, "#ffffff", 2);
        figure.text((a.x + c.x) / 2, (a.y + c.y) / 2 + 4,
                    fmt::format("rank {}", rank), Figure::Anchor::kMiddle,
                    "#ffffff");
        if (k > 0) {
          // The ranks of one block add its gradient
          const double x = (a.x + c.x) / 2 + 30;
          figure.line({{x, (a.y + c.y) / 2}, {x, (a.y + c.y) / 2 + kLevel}},
                      pictures::kMuted, 1, "3 3");
        }
      }
    }
    const Point side = corner(0.9, kSide, k);
    figure.text(side.x + 24, side.y,
                fmt::format("square {}: rows {} to {} of 4", k, kSide * k,
                            kSide * k + kSide - 1));
    figure.text(side.x + 24, side.y + 17, "inside: the steps of 2D",
                Figure::Anchor::kStart, pictures::kMuted);
  }
  const Point between = corner(1, kSide, 0);
  figure.text(between.x + 58, between.y - kLevel / 2 + 4,
              "between: an all-reduce of dW", Figure::Anchor::kStart,
              pictures::kMuted);
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

std::string depths() {
  Figure figure(
      "Many tokens favour depth, few tokens none\n"
      "Products of a block on 64 ranks, forward and backward; dots: the least",
      640);
  const double y = Plot::row(figure, 230);
  Plot plot(figure, {50, y, 460, 230},
            {"depth d of the 64 ranks", 1, 64, {}, true, {1, 4, 16, 64}},
            {"elements sent by a rank, over h²", 2, 512, {}, true});
  for (const auto& [x, stroke, name] : {std::tuple(64.0, kOrange, "bs = 64 h"),
                                        std::tuple(16.0, kGold, "bs = 16 h"),
                                        std::tuple(2.0, kGreen, "bs = 2 h"),
                                        std::tuple(0.25, kBlue, "bs = h/4")}) {
    std::vector<Value> values;
    for (const double d : {1, 4, 16, 64}) {
      values.push_back({d, sent(std::sqrt(64 / d), d, x)});
    }
    plot.curve(values, stroke, name);
    plot.dots({*std::min_element(
                  values.begin(), values.end(),
                  [](const Value& a, const Value& b) { return a.y < b.y; })},
              stroke);
  }
  plot.labels();
  return figure.svg("");
}

}  // namespace

std::vector<PageFigure> all() {
  return {{"chapters/09_tensor_parallel_2p5d/squares.svg", squares},
          {"chapters/09_tensor_parallel_2p5d/depths.svg", depths}};
}

}  // namespace shardbook::figures::page_09
