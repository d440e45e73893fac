// Tensor parallelism: the matrices of an MLP, what f and g add, and how wide a
// model must be.

#include <fmt/format.h>

#include <array>

#include "chapters/07_tensor_parallel/mappings.h"
#include "chapters/11_dtensor/placement_picture.h"
#include "chapters/common/run/textbook.h"
#include "chapters/figures/pages.h"
#include "chapters/figures/runs.h"
#include "comm/launch.h"
#include "core/ops.h"

namespace shardbook::figures::page_07 {
namespace {

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
  constexpr double kH = 28, kTokens = 42, kRow = 134;
  const dtensor::Held w1 = dtensor::held_by("W1", {kHidden, 4 * kHidden},
                                            {dtensor::shard(1)}, {kRanks});
  const dtensor::Held w2 = dtensor::held_by("W2", {4 * kHidden, kHidden},
                                            {dtensor::shard(0)}, {kRanks});
  Figure figure(
      "Columns, then rows: one all-reduce behind the pair\n"
      "An MLP on t = 2 ranks. A rank's part has its colour; both ranks have x "
      "and y.");
  const double top = figure.add_row(kRanks * kRow + 46);

  for (int rank = 0; rank < kRanks; ++rank) {
    const double y = top + kRow * rank + kRow / 2 + 4;  // the middle
    const char* color = rank_color(rank);
    figure.text(0, y + 4, fmt::format("rank {}", rank), color);
    const auto step = [&](double from, double to) {
      arrow(figure, {from, y}, {to, y}, kMuted);
    };
    const auto tensor = [&](double x, double width, const char* fill) {
      figure.colored_box({x, y - kTokens / 2, width, kTokens}, fill);
    };
    tensor(56, kH, kInk);
    step(88, 146);
    draw_matrix(figure, w1, rank, {150, y - kH / 2, 4 * kH, kH});
    step(266, 296);
    tensor(300, 4 * kH / kRanks, color);
    step(360, 390);
    draw_matrix(figure, w2, rank, {394, y - 2 * kH, kH, 4 * kH});
    step(426, 456);
    tensor(460, kH, color);
    step(492, 568);
    tensor(572, kH, kInk);
  }
  const double names = top + kRanks * kRow + 18;
  struct Name {
    double x;
    const char *name, *shape;
  };
  for (const Name& each :
       std::array<Name, 6>{{{70, "x", "[bs, h]"},
                            {206, "columns of W1", "[h, 4h/t]"},
                            {328, "GELU(x W1)", "[bs, 4h/t]"},
                            {408, "rows of W2", "[4h/t, h]"},
                            {486, "a term", "[bs, h]"},
                            {586, "y", "[bs, h]"}}}) {
    figure.middle(each.x, names, each.name);
    figure.middle(each.x, names + 16, each.shape, kMuted);
  }
  for (const auto& [x, name, does] : {std::tuple(113.0, "f", "backward"),
                                      std::tuple(530.0, "g", "forward")}) {
    figure.box({x - 8, top + 22, 16, kRanks * kRow - 30}, "comm");
    figure.middle(x, top + kRow + 4, name, kWhite);
    figure.middle(x, top + 14, fmt::format("all-reduce {}", does),
                  color_of("comm"));
  }
  return figure.svg("");
}

// y = x W1 W2 for one number x, with W1 by columns and W2 by rows.
struct Terms {
  double w1 = 0, w2 = 0;
  double x = 0, hidden = 0, y = 0;     // forward; y is this rank's term
  double dx = 0, dhidden = 0;          // this rank's terms
  double sum_of_y = 0, sum_of_dx = 0;  // behind g, and behind f
};

std::array<Terms, 2> terms_of_ranks() {
  std::array<Terms, 2> all;
  run_ranks(2, [&](ProcessGroup& tp) {
    const auto number = [](double value) {
      const Tensor x = Tensor::full({1, 1}, value);
      x.set_requires_grad();
      return x;
    };
    Terms& own = all[static_cast<std::size_t>(tp.rank())];
    own.w1 = 2 - tp.rank(), own.w2 = 4 + tp.rank(), own.x = 3;
    const Tensor w1 = number(own.w1), w2 = number(own.w2);
    const Tensor x = number(own.x), term = matmul(matmul(x, w1), w2);
    sum(term).backward();
    const Tensor hidden = number(matmul(x, w1).item());
    sum(matmul(hidden, w2)).backward();
    own.hidden = hidden.item(), own.y = term.item();
    own.dx = x.grad().item(), own.dhidden = hidden.grad().item();
    const Tensor whole_x = number(own.x);
    const Tensor y = tensor_parallel::reduce_from(
        matmul(matmul(tensor_parallel::copy_to(whole_x, tp), w1), w2), tp);
    sum(y).backward();
    own.sum_of_y = y.item(), own.sum_of_dx = whole_x.grad().item();
  });
  return all;
}

std::string conjugate() {
  const std::array<Terms, 2> ranks = terms_of_ranks();
  Figure figure(
      "f copies forward and adds backward; g adds forward and copies backward\n"
      "y = x W1 W2 with one number x = 3, W1 = [2 1] by columns, W2 = [4 5] by "
      "rows");
  constexpr double kX = 60, kF = 150, kIn = 205, kHidden = 315, kTerm = 425,
                   kG = 490, kY = 580, kHalf = 22;
  const auto number = [](double value) { return fmt::format("{:.0f}", value); };
  const auto panel = [&](bool is_forward,
                         const std::array<const char*, 4>& names, double left,
                         double right, const auto& values_of) {
    const double top = figure.add_row(142) + 22, middle = top + 46;

    const auto step = [&](double x0, double y0, double x1, double y1) {
      if (is_forward) {
        arrow(figure, {x0, y0}, {x1, y1}, kMuted);
      } else {
        arrow(figure, {x1, y1}, {x0, y0}, kMuted);
      }
    };
    // What all ranks have is grey
    const auto box = [&](double x, double y, double value, int rank) {
      named_box(figure, {x - kHalf, y - 11, 2 * kHalf, 22},
                rank < 0 ? color_of("empty") : rank_color(rank), number(value),
                rank < 0 ? kInk : kWhite);
    };
    for (std::size_t i = 0; i < names.size(); ++i) {
      figure.middle(std::array{kX, kHidden, kTerm, kY}[i], top - 6, names[i],
                    kMuted);
    }
    box(kX, middle, left, -1);
    box(kY, middle, right, -1);
    step(kX + kHalf + 3, middle, kF - 13, middle);
    step(kG + 13, middle, kY - kHalf - 3, middle);
    for (std::size_t r = 0; r < 2; ++r) {
      const double y = middle + (r == 0 ? -28 : 28);
      const std::array<double, 3> values = values_of(ranks[r]);
      const std::array<double, 3> at = {kIn, kHidden, kTerm};
      for (std::size_t i = 0; i < 3; ++i) {
        box(at[i], y, values[i], static_cast<int>(r));
      }
      step(kF + 11, middle + (r == 0 ? -6 : 6), kIn - kHalf - 3, y);
      step(kTerm + kHalf + 3, y, kG - 11, middle + (r == 0 ? -6 : 6));
      const std::array<double, 2> weights = {ranks[r].w1, ranks[r].w2};
      for (std::size_t i = 0; i < 2; ++i) {
        step(at[i] + kHalf + 3, y, at[i + 1] - kHalf - 3, y);
        figure.middle((at[i] + at[i + 1]) / 2, y - 6,
                      "× " + number(weights[i]));
      }
    }
    for (const auto& [x, name, adds] :
         {std::tuple(kF, "f", !is_forward), std::tuple(kG, "g", is_forward)}) {
      named_box(figure, {x - 9, middle - 16, 18, 32},
                color_of(adds ? "comm" : "empty"), name, adds ? kWhite : kInk);
      figure.middle(x, middle + 58, adds ? "adds" : "copies",
                    adds ? color_of("comm") : kMuted);
    }
  };
  figure.heading("Forward: values, from left to right");
  panel(true, {"x", "x W1", "term of y", "y"}, ranks[0].x, ranks[0].sum_of_y,
        [](const Terms& rank) {
          return std::array{rank.x, rank.hidden, rank.y};
        });
  figure.heading("Backward: gradients, from right to left");
  panel(false, {"dx", "d(x W1)", "d(term)", "dy"}, ranks[0].sum_of_dx, 1,
        [](const Terms& rank) {
          return std::array{rank.dx, rank.dhidden, 1.0};
        });
  return figure.svg(fmt::format(
      "Forward, rank 0 has the term {:.0f} and rank 1 {:.0f}; g adds them to "
      "{:.0f}. Backward, rank 0 has {:.0f} and rank 1 {:.0f}; f adds them to "
      "{:.0f}.",
      ranks[0].y, ranks[1].y, ranks[0].sum_of_y, ranks[0].dx, ranks[1].dx,
      ranks[0].sum_of_dx));
}

// Exposed communication as a share of the step of 24 blocks, by width.
std::vector<Value> exposed_shares(const char* cluster, int ranks, int batch,
                                  const std::vector<double>& widths) {
  const bool is_textbook = cluster == std::string("textbook");
  return sweep(
      [&](double width) {
        const std::string model = fmt::format(
            R"({{"n_embd": {}, "n_layer": 24, "n_head": 32, "vocab_size": )"
            R"(50304, "n_positions": 2048}})",
            width);
        return "07_tensor_parallel" +
               on_shapes(cluster, ranks, model, batch, 1024) +
               (is_textbook ? "" : " --dtype bf16");
      },
      widths, exposed_share);
}

std::string threshold() {
  // (t - 1) e rate / (9 bandwidth)
  const auto least_width = [](double t, double e, double rate,
                              double bandwidth) {
    return (t - 1) * e * rate / (9 * bandwidth);
  };
  const sim::Cluster a100 = sim::Cluster::read("dgx-a100");
  const double rate = a100.device.peak_flops.at(DType::kBF16);
  struct Case {
    const char* name;
    const char* cluster;
    int ranks;
    Stroke stroke;
    double width;
  };
  std::vector<Case> cases = {
      {"8 ranks of textbook, f32", "textbook", 8, kBlue,
       least_width(8, 4, textbook::kRate, textbook::kBandwidth)},
      {"16 A100 of two nodes, bf16", "dgx-a100", 16, kOrange,
       least_width(16, 2, rate, a100.nics_per_node * a100.network.bytes_per_s)},
      {"8 A100 of a node, bf16", "dgx-a100", 8, kGreen,
       least_width(8, 2, rate, a100.intra_node.bytes_per_s)}};
  const std::vector<double> widths = {768,  1024, 1280, 1536, 2048,
                                      3072, 4096, 6144, 8192, 12288};

  Figure figure(
      "Above (t − 1)eγ/9β, products outweigh the all-reduces\n"
      "Dashed from top to bottom: this width. Curves: 8192 tokens in a step; "
      "dots: 32768");
  Plot plot(figure, PlotSize{50, 410, 250}, logarithmic("width h", 768, 12288),
            {"exposed communication, share of the step", 0, 0.8, {"%", 0.01}});
  std::string details;
  double from_top = 0;
  for (Case& each : cases) {
    const auto shares = exposed_shares(each.cluster, each.ranks, 8, widths);
    plot.mark(each.width, each.stroke, fmt::format("{:.0f}", each.width),
              from_top);
    plot.curve(shares, each.stroke, each.name);
    details += fmt::format("{}: from {:.0f} % to {:.0f} %. ", each.name,
                           100 * shares.front().y, 100 * shares.back().y);
    // Four times the tokens
    if (each.cluster == std::string("textbook")) {
      plot.dots(exposed_shares(each.cluster, each.ranks, 32, widths),
                each.stroke);
    }
  }
  return plot.svg(details);
}

std::string speed() {
  const auto by_ranks = [](const Column& column) {
    return sweep("07_tensor_parallel --dtype bf16" +
                     on_shapes("dgx-a100", 1, "gpt-6.7b", 8, 1024) +
                     " --steps 2",
                 "--world-size", {1, 2, 4, 8, 16, 32}, column);
  };
  const auto times = by_ranks(step_s), exposed = by_ranks(exposed_share);
  std::vector<Value> ideal;
  for (const auto& [t, seconds] : times) ideal.push_back({t, times[0].y / t});
  Figure figure(fmt::format(
      "Eight A100 of a node are {:.1f} times as fast as one, 32 only "
      "{:.1f} times",
      times[0].y / times[3].y, times[0].y / times[5].y));
  Plot plot(figure, PlotSize{60, 460, 230}, logarithmic("ranks t", 1, 32),
            {"a step of GPT 6.7B, bf16, 8 samples; in percent: exposed",
             0.032,
             2.048,
             {"ms", 1e-3},
             true});
  plot.mark(11.3, kGray, "edge of the node");
  plot.curve(ideal, kGray, "1/t");
  plot.dotted_curve(times, kBlue, "step");
  for (std::size_t i = 1; i < times.size(); ++i) {
    plot.text(times[i].x, times[i].y,
              fmt::format("{:.0f} %", 100 * exposed[i].y), kBlue,
              Figure::Anchor::kStart, {-4, -10});
  }
  return plot.svg();
}

}  // namespace

std::vector<PageFigure> all() {
  return {{"chapters/07_tensor_parallel/mlp.svg", mlp},
          {"chapters/07_tensor_parallel/conjugate.svg", conjugate},
          {"chapters/07_tensor_parallel/threshold.svg", threshold},
          {"chapters/07_tensor_parallel/speed.svg", speed}};
}

}  // namespace shardbook::figures::page_07
