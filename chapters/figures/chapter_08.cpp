// Tensor parallelism in 2D: one product in frames, the groups of a rank, and the
// tokens from which the square is cheaper than one dimension.

#include <fmt/format.h>

#include <set>

#include "chapters/08_tensor_parallel_2d/products.h"
#include "chapters/08_tensor_parallel_2d/summa_strategy.h"
#include "chapters/figures/figures.h"
#include "comm/device_mesh.h"
#include "comm/launch.h"

namespace shardbook::figures::page_08 {

using Blocks = std::set<std::pair<int, int>>;

constexpr int kSide = 3;

// The blocks of A and B that travel in each step of a product on 3 x 3 ranks.
struct Travels {
  std::vector<Blocks> a, b;
};

Travels travels_of_product() {
  constexpr int kRanks = kSide * kSide;
  std::vector<std::vector<CommRecord>> ranks(kRanks);
  run_ranks(kRanks, [&](ProcessGroup& world) {
    DeviceMesh mesh(world, summa::square(kSide));
    const Tensor block = Tensor::full({1, 1}, 1);
    world.clear_records();
    // Its messages are the figure
    (void)summa::multiply_ab(block, block, summa::grid_of(mesh));
    ranks[world.rank()] = world.records();
  });
  Travels travels;
  travels.a.resize(kSide);
  travels.b.resize(kSide);
  for (int rank = 0; rank < kRanks; ++rank) {
    const summa::Place place = summa::place_of(rank, kSide);
    std::size_t rows = 0, columns = 0;
    for (const CommRecord& record : ranks[rank]) {
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
  constexpr double kCell = 32, kInner = kCell - 3, kGrid = kSide * kCell;
  constexpr double kX = 44, kW = 184, kY = 324, kTerm = kInner / kSide;
  const Travels travels = travels_of_product();
  Figure figure(
      "Column k of X goes along rows, row k of W along columns\n"
      "9 ranks. A block of Y has three terms; each step adds the purple one.",
      500);
  for (int k = 0; k < kSide; ++k) {
    const double y = figure.add_row(kGrid + 40) + 30;
    figure.text(0, y + kGrid / 2 + 4, fmt::format("k = {}", k));
    const auto cells = [&](double left, const std::string& name,
                           const auto& draw) {
      figure.middle(left + kGrid / 2, y - 8, name);
      for (int i = 0; i < kSide; ++i) {
        for (int j = 0; j < kSide; ++j) {
          draw(Box{left + kCell * j, y + kCell * i, kInner, kInner},
               std::pair(i, j));
        }
      }
    };
    // Arrows lead from the block that travels to others of its row or column
    const auto operand = [&](double left, const char* name, const Blocks& moved,
                             bool along_row) {
      cells(left, name, [&](const Box& at, const auto& block) {
        figure.box(at, moved.count(block) > 0 ? "comm" : "empty");
      });
      for (const auto& [i, j] : moved) {
        const int own = along_row ? j : i;
        const double side = kCell * (along_row ? i : j) + kInner / 2;
        const auto at = [&](double along) {
          return along_row ? Point{left + along, y + side}
                           : Point{left + side, y + along};
        };
        for (const int end : {0, kSide - 1}) {
          if (end == own) continue;
          figure.arrow(at(kCell * own + (end < own ? -1 : kInner + 1)),
                       at(kCell * end + kInner / 2), "comm");
        }
      }
    };
    operand(kX, "X", travels.a[k], true);
    operand(kW, "W", travels.b[k], false);
    figure.middle((kX + kGrid + kW) / 2, y + kGrid / 2 + 4, "×");
    figure.middle((kW + kGrid + kY) / 2, y + kGrid / 2 + 4, "→");
    cells(kY, fmt::format("Y: + X(i, {0}) W({0}, j)", k),
          [&](const Box& at, const auto&) {
            for (int term = 0; term < kSide; ++term) {
              const Box part{at.x + kTerm * term, at.y, kTerm - 1, at.height};
              figure.box(part, term < k ? kInk : term == k ? "comm" : "empty");
            }
          });
  }
  return figure.svg(
      "Three frames. In frame k, the blocks of column k of X and of row k of W "
      "travel, and each block of Y has one term more.");
}

std::string trap() {
  constexpr int kOwn = 5;  // rank (1, 2)
  constexpr double kWide = 84, kHigh = 64, kLeft = 44;
  const Topology square = summa::square(kSide);
  const summa::Place own = summa::place_of(kOwn, kSide);
  Figure figure(
      fmt::format("A rank's number in ROW is its column j, in COL its row i\n"
                  "Rank {} = ({}, {}): its ROW group is blue, its COL orange.",
                  kOwn, own.i, own.j),
      450);
  const double top = figure.add_row(kSide * kHigh + 44) + 24;
  for (int j = 0; j < kSide; ++j) {
    figure.middle(kLeft + kWide * j + kWide / 2, top - 8,
                  fmt::format("j = {}", j), kMuted);
  }
  for (int rank = 0; rank < kSide * kSide; ++rank) {
    const summa::Place place = summa::place_of(rank, kSide);
    if (place.j == 0) {
      figure.text(0, top + kHigh * place.i + kHigh / 2 + 4,
                  fmt::format("i = {}", place.i), kMuted);
    }
    const Box at{kLeft + kWide * place.j, top + kHigh * place.i, kWide - 4,
                 kHigh - 4};
    const bool in_row = place.i == own.i, in_col = place.j == own.j;
    const double half = at.width / 2;
    if (in_row && in_col) {
      figure.box({at.x, at.y, half, at.height}, kBlue.color);
      figure.box({at.x + half, at.y, half, at.height}, kOrange.color);
    } else {
      figure.box(at, in_row ? kBlue.color : in_col ? kOrange.color : "empty");
    }
    double y = at.y;
    const auto text = [&](const char* format, int number) {
      figure.middle(at.x + half, y += 17,
                    fmt::format(fmt::runtime(format), number),
                    in_row || in_col ? kWhite : kInk);
    };
    text("rank {}", rank);
    if (in_row) text("{} in ROW", square.coordinate(rank, "row"));
    if (in_col) text("{} in COL", square.coordinate(rank, "col"));
  }
  const double right = kLeft + kSide * kWide + 10;
  const double row = top + kHigh * own.i + kHigh / 2;
  figure.text(right, row - 2, "ROW: fixed i,", kBlue.color);
  figure.text(right, row + 14, "numbered by j", kBlue.color);
  figure.text(right, top + 14, "COL: fixed j,", kOrange.color);
  figure.text(right, top + 30, "numbered by i", kOrange.color);
  return figure.svg();
}

// A GPT of width 8192 on 16 samples, `tokens_over_h` times 8192 tokens in all.
constexpr double kWidth = 8192, kSamples = 16;
std::string wide_model(const std::string& cluster, int ranks,
                       double tokens_over_h) {
  return on_shapes(cluster, ranks, gpt_of(16, kWidth, 64, 50304, 16384),
                   kSamples, tokens_over_h * kWidth / kSamples) +
         (cluster == "textbook" ? " --steps 1" : " --steps 1 --dtype bf16");
}

// What 2D has for each that 1D has, over tokens per unit of width.
std::vector<Value> shares_of(const std::string& cluster, int ranks,
                             const Column& column) {
  const auto by_tokens = [&](const char* chapter) {
    return sweep(
        [&](double x) { return chapter + wide_model(cluster, ranks, x); },
        {0.25, 0.5, 1, 2, 4, 8, 16, 32}, column);
  };
  std::vector<Value> shares = by_tokens("08_tensor_parallel_2d");
  const std::vector<Value> whole = by_tokens("07_tensor_parallel");
  for (std::size_t i = 0; i < shares.size(); ++i) shares[i].y /= whole[i].y;
  return shares;
}

struct Case {
  const char* cluster;
  int q;
  Stroke stroke;
  const char* name;
};

// From so many tokens per unit of width on, 2D sends less than 1D.
double least_tokens(int q) { return 36.0 / (8 * q - 13); }

// Shares over tokens, what 1D has, and dots where 2D begins to send less.
Plot shares_plot(const std::string& title, double width,
                 const std::string& name, const Column& column,
                 const std::vector<Case>& cases) {
  Plot plot(title, {34, width, 250, 500},
            logarithmic("tokens over the width, bs/h", 0.25, 32),
            logarithmic(name, 0.25, 8, {}, fraction));
  plot.curve({{0.25, 1}, {32, 1}}, kGray);
  for (const Case& each : cases) {
    plot.curve(shares_of(each.cluster, each.q * each.q, column), each.stroke,
               each.name);
    plot.dots({{least_tokens(each.q), 1}}, each.stroke);
  }
  return plot;
}

std::string threshold() {
  const std::vector<Case> cases = {{"textbook", 2, kOrange, "4 ranks"},
                                   {"textbook", 4, kBlue, "16 ranks"},
                                   {"textbook", 8, kGreen, "64 ranks"}};
  Plot plot = shares_plot(
      "2D sends less than 1D from about bs/h = 36/(8q − 13) on\n"
      "Simulated steps, width 8192; dots: 36/(8q − 13) for q = 2, 4, 8",
      380, "bytes sent in 2D, over those sent in 1D", sent_bytes, cases);
  for (const Case& each : cases) {
    const double x = least_tokens(each.q);
    plot.end(x, 1, fmt::format("{:.2g}", x), each.stroke, {-6, 16});
  }
  return plot.svg();
}

std::string times() {
  return shares_plot(
             "Fewer bytes do not yet make a shorter step\n"
             "Simulated steps, width 8192; dots: from here on, 2D sends less",
             340, "time of a step in 2D, over that in 1D", step_s,
             {{"textbook", 4, kGold, "16 of textbook"},
              {"textbook", 8, kPurple, "64 of textbook"},
              {"dgx-a100", 4, kBlue, "16 A100"},
              {"dgx-a100", 8, kGreen, "64 A100"}})
      .svg();
}

std::vector<PageFigure> all() {
  return {{"chapters/08_tensor_parallel_2d/frames.svg", frames},
          {"chapters/08_tensor_parallel_2d/trap.svg", trap},
          {"chapters/08_tensor_parallel_2d/threshold.svg", threshold},
          {"chapters/08_tensor_parallel_2d/times.svg", times}};
}

}  // namespace shardbook::figures::page_08
