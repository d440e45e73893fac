// 2.5D: squares of ranks above one another, what they send, and from how many
// tokens on they pay.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "chapters/08_tensor_parallel_2d/bill.h"
#include "chapters/09_tensor_parallel_2p5d/tesseract.h"
#include "chapters/figures/figures.h"

namespace shardbook::figures::page_09 {

// A square of ranks that lies on a table, seen from its left.
struct Square {
  Point front;  // the left corner
  double cell, slant, height;
  int side;

  Point corner(double i, double j) const {
    return {front.x + cell * j + slant * (side - i),
            front.y - height * (side - i)};
  }
  void draw(Figure& figure, int i, int j, const std::string& color) const {
    const Point a = corner(i, j), b = corner(i, j + 1);
    const Point c = corner(i + 1, j + 1), d = corner(i + 1, j);
    figure.path(path_of({a, b, c, d}) + "z", color);
    figure.line({a, b, c, d, a}, kWhite, side > 2 ? 1 : 2);
  }
};

std::string squares() {
  constexpr int kSide = 2, kDepth = 2;
  constexpr double kLevel = 104;
  const Topology topology = tesseract::squares(kSide, kDepth);
  Figure figure(
      "Each square has its own rows of the batch and the same weights\n"
      "8 ranks: d = 2 squares of q x q = 2 x 2. A colour is a block of W.",
      500);
  const double top = figure.add_row(kDepth * kLevel + 4) + 2;
  for (int k = kDepth - 1; k >= 0; --k) {
    const Square square = {
        {0, top + kLevel * (kDepth - 1 - k) + 76}, 84, 36, 36, kSide};
    for (int i = 0; i < kSide; ++i) {
      for (int j = 0; j < kSide; ++j) {
        const int rank =
            topology.get_rank({{"dep", k}, {"col", i}, {"row", j}});
        square.draw(figure, i, j, rank_color(kSide * i + j));
        const Point middle = square.corner(i + 0.5, j + 0.5);
        figure.middle(middle.x, middle.y + 4, fmt::format("rank {}", rank),
                      kWhite);
        if (k > 0) {
          // The ranks of one block add its gradient
          figure.line(
              {{middle.x + 32, middle.y}, {middle.x + 32, middle.y + kLevel}},
              kMuted, 1, "3 3");
        }
      }
    }
    const Point side = square.corner(1, kSide);
    figure.text(side.x + 44, side.y,
                fmt::format("square {}: rows {} and {} of 4", k, kSide * k,
                            kSide * k + 1));
    figure.text(side.x + 44, side.y + 17, "inside: the steps of 2D", kMuted);
    if (k > 0) {
      figure.text(side.x + 44, side.y + 17 + kLevel / 2,
                  "between: an all-reduce of dW", kMuted);
    }
  }
  return figure.svg();
}

std::string buys() {
  constexpr double kColumn = 128, kLeft = 78, kGB = 1e9, kBars = 150;
  constexpr double kStacks = 132, kMost = 5 * kGB;
  Figure figure(
      "More depth sends fewer bytes, but copies the weights\n"
      "GPT-2 medium on 16 ranks, 16 samples of 1024 tokens, bf16",
      500);
  const double top = figure.add_row(kStacks + 24 + kBars + 57);
  const double bottom = top + kStacks + 24 + kBars;
  figure.text(0, top + kStacks / 2, "16 ranks", kMuted);
  figure.text(0, top + kStacks + 30, "a rank sends", kMuted);
  figure.text(0, top + kStacks + 46, "in a step", kMuted);
  figure.text(0, bottom + 18, "depth d", kMuted);
  figure.text(0, bottom + 36, "a rank holds", kMuted);
  figure.line({{kLeft, bottom}, {kLeft + 3 * kColumn, bottom}}, kMuted);
  double x = kLeft;
  for (const int d : {1, 4, 16}) {
    const int q = static_cast<int>(std::sqrt(16 / d));
    // 1. The squares, from the lowest one up
    for (int k = 0; k < d; ++k) {
      const double level = d == 4 ? 30 : 7.4;
      const Square square = {
          {x + 14, top + kStacks - 8 - level * k}, 18, 8, 8, q};
      for (int i = 0; i < q; ++i) {
        for (int j = 0; j < q; ++j) square.draw(figure, i, j, kMuted);
      }
    }
    figure.text(x + 14, top + kStacks + 10,
                fmt::format("{} of {} x {}", d, q, q));
    // 2. What a rank sends, by group; with q = 1 the depth is the world
    std::map<std::string, double> by_group = sent_by_group(run_once(
        fmt::format("09_tensor_parallel_2p5d --dtype bf16 --depth {}", d) +
        on_shapes("dgx-a100", 16, "gpt2-medium", 16, 1024)));
    if (q == 1) by_group["dep"] = by_group["world"];
    double y = bottom, all = 0;
    struct Part {
      const char *group, *css_class, *name;
    };
    for (const Part& part : {Part{"row", "forward", "activations"},
                             Part{"col", "weights", "weights"},
                             Part{"dep", "comm", "gradients over the depth"}}) {
      const double bytes = by_group[part.group];
      const double height = kBars * bytes / kMost;
      figure.box({x + 14, y - height, 40, height}, part.css_class);
      if (height > 8 && q > 1) {
        figure.text(x + 58, y - height / 2 + 4,
                    fmt::format("{:.2f}", bytes / kGB), part.css_class);
      }
      figure.describe(
          fmt::format("Depth {}, {}: {:.2f} GB", d, part.name, bytes / kGB));
      y -= height;
      all += bytes;
    }
    figure.text(x + 14, y - 6, fmt::format("{:.2f} GB", all / kGB));
    figure.text(x + 14, bottom + 18, std::to_string(d));
    figure.text(
        x + 14, bottom + 36,
        q == 1 ? "all weights" : fmt::format("1/{} of the weights", q * q));
    x += kColumn;
  }
  figure.legend({"forward: activations, in rows",
                 "weights: weights, in columns",
                 "comm: gradients, over depth"});
  return figure.svg();
}

// Sent by a rank for the products of a block of width h, forward and backward,
// in units of h^2.
double sent(double q, double d, double tokens_over_h) {
  return summa::over_linears(1, [&](double k, double n) {
    return summa::linear_elements(q, d, tokens_over_h, k, n);
  });
}

// From so many tokens per unit of width on, d squares send less than one.
double least_tokens(double d, double ranks) {
  return 12 / 7.0 * std::sqrt(d) *
         (1 - (std::sqrt(d) + 1) / (3 * std::sqrt(ranks)));
}

std::string threshold() {
  constexpr double kWidth = 1024, kGiB = 1 << 30;
  Plot plot(
      fmt::format("From {:.0f} tokens on, four squares send less than one\n"
                  "GPT-2 medium on 16 ranks. Lines: simulated; marks: by the "
                  "inequality",
                  kWidth * least_tokens(4, 16)),
      {34, 350, 250, 500},
      marked("tokens of a step", {0, 2048, 4096, 6144, 8192}),
      {"bytes that a rank sends in a step", 0, 5 * kGiB, {"GiB", kGiB}});
  for (const auto& [d, stroke, name] :
       {std::tuple(1, kOrange, "d = 1, 4 x 4"),
        std::tuple(4, kBlue, "d = 4, 2 x 2"),
        std::tuple(16, kGreen, "d = 16, 1 x 1")}) {
    if (d > 1) {
      const double least = kWidth * least_tokens(d, 16);
      plot.mark(least, stroke, fmt::format("{:.0f}", least), d > 4 ? 0 : 40);
    }
    const std::vector<Value> values = sweep(
        fmt::format("09_tensor_parallel_2p5d --depth {}", d) +
            on_shapes("textbook", 16, "gpt2-medium", 16, 32),
        "--seq", {32, 64, 128, 192, 256, 320, 384, 512},
        [](const Report& report) { return sent_bytes(report) / kSteps; }, 16);
    plot.curve(values, stroke, name);
  }
  return plot.svg();
}

std::string depths() {
  Plot plot(
      "Many tokens favour depth, few tokens none\n"
      "Products of a block on 64 ranks, forward and backward; dots: the least",
      {34, 360, 230, 500},
      logarithmic("depth d of the 64 ranks", 1, 64, {1, 4, 16, 64}),
      logarithmic("elements sent by a rank, over h²", 2, 512));
  for (const auto& [x, stroke, name] : {std::tuple(64.0, kOrange, "bs = 64 h"),
                                        std::tuple(16.0, kGold, "bs = 16 h"),
                                        std::tuple(2.0, kGreen, "bs = 2 h"),
                                        std::tuple(0.25, kBlue, "bs = h/4")}) {
    std::vector<Value> values;
    for (const double d : {1, 4, 16, 64}) {
      values.push_back({d, sent(std::sqrt(64 / d), d, x)});
    }
    plot.curve(values, stroke, name);
    plot.dots({std::ranges::min(values, {}, &Value::y)}, stroke);
  }
  return plot.svg();
}

std::vector<PageFigure> all() {
  return {{"chapters/09_tensor_parallel_2p5d/squares.svg", squares},
          {"chapters/09_tensor_parallel_2p5d/buys.svg", buys},
          {"chapters/09_tensor_parallel_2p5d/threshold.svg", threshold},
          {"chapters/09_tensor_parallel_2p5d/depths.svg", depths}};
}

}  // namespace shardbook::figures::page_09
