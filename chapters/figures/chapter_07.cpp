// Tensor parallelism: the matrices of an MLP, and how far ranks help.

#include <fmt/format.h>

#include "chapters/11_dtensor/placement_picture.h"
#include "chapters/figures/pages.h"
#include "chapters/figures/plot.h"
#include "chapters/figures/ranks.h"
#include "chapters/figures/runs.h"
#include "chapters/figures/shapes.h"

namespace shardbook::figures::page_07 {
namespace {

using pictures::Box;
using pictures::Figure;

// A matrix with the part of one rank in its colour.
void draw_matrix(Figure& figure, const dtensor::Held& held, int rank,
                 const Box& at) {
  const auto r = static_cast<std::size_t>(rank);
  figure.box(at, "empty");
  const double row = at.height / static_cast<double>(held.rows);
  const double column = at.width / static_cast<double>(held.columns);
  for (const IndexRun& rows : held.rows_of[r]) {
    for (const IndexRun& columns : held.columns_of[r]) {
      figure.colored_box({at.x + column * static_cast<double>(columns.begin),
                          at.y + row * static_cast<double>(rows.begin),
                          column * static_cast<double>(columns.count),
                          row * static_cast<double>(rows.count)},
                         rank_color(rank));
    }
  }
}

std::string mlp() {
  constexpr int kRanks = 2;
  constexpr std::int64_t kHidden = 4;
  constexpr double kH = 26, kTokens = 40, kRow = 128;
  const dtensor::Held a = dtensor::held_by("A", {kHidden, 4 * kHidden},
                                           {dtensor::shard(1)}, {kRanks});
  const dtensor::Held b = dtensor::held_by("B", {4 * kHidden, kHidden},
                                           {dtensor::shard(0)}, {kRanks});
  Figure figure(
      "Columns, then rows: one all-reduce behind the pair\n"
      "An MLP on two ranks. A rank's part has its colour; both ranks have x "
      "and y.",
      640);
  const double top = figure.add_row(kRanks * kRow + 46);
  const auto middle = [&](double x, double y, const std::string& text,
                          const std::string& color = pictures::kInk) {
    figure.text(x, y, text, Figure::Anchor::kMiddle, color);
  };
  for (int rank = 0; rank < kRanks; ++rank) {
    const double y = top + kRow * rank + kRow / 2 + 4;  // the middle
    const char* color = rank_color(rank);
    figure.text(0, y + 4, fmt::format("rank {}", rank), Figure::Anchor::kStart,
                color);
    const auto step = [&](double from, double to) {
      arrow(figure, {from, y}, {to, y}, pictures::kMuted);
    };
    const auto tensor = [&](double x, double width, double height) {
      figure.colored_box({x, y - height / 2, width, height}, color);
    };
    figure.colored_box({52, y - kTokens / 2, kH, kTokens}, pictures::kInk);
    step(82, 128);
    draw_matrix(figure, a, rank, {132, y - kH / 2, 4 * kH, kH});
    step(240, 264);
    tensor(268, 4 * kH / kRanks, kTokens);
    middle(268 + 2 * kH / kRanks, y - kTokens / 2 - 6, "GELU");
    step(324, 348);
    draw_matrix(figure, b, rank, {352, y - 2 * kH, kH, 4 * kH});
    step(382, 406);
    tensor(410, kH, kTokens);
    step(440, 500);
    figure.colored_box({504, y - kTokens / 2, kH, kTokens}, pictures::kInk);
  }
  const double names = top + kRanks * kRow + 18;
  middle(65, names, "x");
  middle(65, names + 16, "[n, h]", pictures::kMuted);
  middle(184, names, "A: columns");
  middle(184, names + 16, "[h, 4h/t]", pictures::kMuted);
  middle(294, names, "x A");
  middle(294, names + 16, "[n, 4h/t]", pictures::kMuted);
  middle(365, names, "B: rows");
  middle(365, names + 16, "[4h/t, h]", pictures::kMuted);
  middle(425, names, "a term", pictures::kInk);
  middle(425, names + 16, "[n, h]", pictures::kMuted);
  middle(517, names, "y");
  middle(517, names + 16, "[n, h]", pictures::kMuted);
  for (const auto& [x, name, does] : {std::tuple(103.0, "f", "backward"),
                                      std::tuple(470.0, "g", "forward")}) {
    figure.box({x - 8, top + 22, 16, kRanks * kRow - 30}, "comm");
    middle(x, top + kRow + 4, name, "#ffffff");
    middle(x, top + 14, fmt::format("all-reduce {}", does),
           pictures::color_of("comm"));
  }
  return figure.svg("");
}

std::string speed() {
  std::vector<Value> times, ideal;
  for (const int t : {1, 2, 4, 8, 16, 32}) {
    Options options = on_shapes("selene", t, "gpt-6.7b", 8, 1024);
    options.dtype = DType::kBF16;
    options.steps = 2;
    const double step_s = run_tensor_parallel(options).time.step_s;
    times.push_back({static_cast<double>(t), step_s});
    ideal.push_back({static_cast<double>(t), times[0].y / t});
  }
  Figure figure(
      fmt::format("Eight ranks of a node are {:.1f} times as fast as one, 32 "
                  "ranks {:.1f} times",
                  times[0].y / times[3].y, times[0].y / times[5].y),
      640);
  const double y = Plot::row(figure, 230);
  Plot plot(figure, {60, y, 440, 230}, {"ranks t", 1, 32, {}, true},
            {"a step of GPT 6.7B, bf16, 8 samples",
             0.032,
             2.048,
             {"ms", 1e-3},
             true});
  plot.mark(11.3, kGray, "edge of the node");
  plot.curve(ideal, kGray, "1/t");
  plot.curve(times, kBlue, "selene: A100");
  plot.dots(times, kBlue);
  plot.labels();
  return figure.svg("");
}

}  // namespace

std::vector<PageFigure> all() {
  return {{"chapters/07_tensor_parallel/mlp.svg", mlp},
          {"chapters/07_tensor_parallel/speed.svg", speed}};
}

}  // namespace shardbook::figures::page_07
