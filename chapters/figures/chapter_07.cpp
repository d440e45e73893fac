// Tensor parallelism: the matrices of an MLP, what f and g add, and how wide a
// model must be.

#include <fmt/format.h>

#include <array>

#include "chapters/07_tensor_parallel/mappings.h"
#include "chapters/11_dtensor/placement_picture.h"
#include "chapters/common/run/textbook.h"
#include "chapters/figures/figures.h"
#include "comm/launch.h"
#include "core/ops.h"

namespace shardbook::figures::page_07 {

// A matrix with the part of one rank in its colour.
void draw_matrix(Figure& figure, const dtensor::Held& held, int rank,
                 const Box& at) {
  figure.box(at, "empty");
  const double row = at.height / held.rows;
  const double column = at.width / held.columns;
  for (const IndexRun& rows : held.rows_of[rank]) {
    for (const IndexRun& columns : held.columns_of[rank]) {
      figure.box({at.x + column * columns.begin, at.y + row * rows.begin,
                  column * columns.count, row * rows.count},
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
    figure.rank_name(0, y + 4, rank);
    const auto step = [&](double from, double to) {
      figure.arrow({from, y}, {to, y}, kMuted);
    };
    const auto tensor = [&](double x, double width, const char* fill) {
      figure.box({x, y - kTokens / 2, width, kTokens}, fill);
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
    figure.middle(x, top + 14, fmt::format("all-reduce {}", does), "comm");
  }
  return figure.svg();
}

// y = x W1 W2 for one number x, with W1 by columns and W2 by rows: values and
// gradients of x, behind f, between the matrices, before g, and of y.
struct Terms {
  std::array<double, 2> weights;
  std::array<double, 5> forward, backward;
};

std::array<Terms, 2> terms_of_ranks() {
  std::array<Terms, 2> all;
  run_ranks(2, [&](ProcessGroup& tp) {
    const auto number = [](double value) {
      const Tensor x = Tensor::full({1, 1}, value);
      x.set_requires_grad();
      return x;
    };
    const Tensor w1 = number(2 - tp.rank()), w2 = number(4 + tp.rank());
    const Tensor own_x = number(3), term = matmul(matmul(own_x, w1), w2);
    sum(term).backward();
    const Tensor hidden = number(matmul(own_x, w1).item());
    sum(matmul(hidden, w2)).backward();
    const Tensor x = number(3);
    const Tensor y = tensor_parallel::reduce_from(
        matmul(matmul(tensor_parallel::copy_to(x, tp), w1), w2), tp);
    sum(y).backward();
    all[tp.rank()] = {
        {w1.item(), w2.item()},
        {x.item(), own_x.item(), hidden.item(), term.item(), y.item()},
        {x.grad().item(), own_x.grad().item(), hidden.grad().item(), 1, 1}};
  });
  return all;
}

std::string conjugate() {
  const std::array<Terms, 2> ranks = terms_of_ranks();
  Figure figure(
      "f copies forward and adds backward; g adds forward and copies backward\n"
      "y = x W1 W2 with one number x = 3, W1 = [2 1] by columns, W2 = [4 5] by "
      "rows");
  constexpr double kF = 150, kG = 490, kHalf = 22;
  // Of x, behind f, between the matrices, before g, of y
  constexpr std::array<double, 5> kAt = {60, 205, 315, 425, 580};
  const auto number = [](double value) { return fmt::format("{:.0f}", value); };
  const auto panel = [&](bool is_forward,
                         const std::array<const char*, 5>& names) {
    const double top = figure.add_row(142) + 22, middle = top + 46;
    const auto step = [&](double x0, double y0, double x1, double y1) {
      if (is_forward) {
        figure.arrow({x0, y0}, {x1, y1}, kMuted);
      } else {
        figure.arrow({x1, y1}, {x0, y0}, kMuted);
      }
    };
    // What all ranks have is grey
    const auto box = [&](double x, double y, double value, int rank) {
      figure.box({x - kHalf, y - 11, 2 * kHalf, 22},
                 rank < 0 ? "empty" : rank_color(rank), number(value),
                 rank < 0 ? kInk : kWhite);
    };
    const auto values_of = [&](const Terms& rank) {
      return is_forward ? rank.forward : rank.backward;
    };
    for (std::size_t i = 0; i < names.size(); ++i) {
      figure.middle(kAt[i], top - 6, names[i], kMuted);
    }
    box(kAt[0], middle, values_of(ranks[0])[0], -1);
    box(kAt[4], middle, values_of(ranks[0])[4], -1);
    step(kAt[0] + kHalf + 3, middle, kF - 13, middle);
    step(kG + 13, middle, kAt[4] - kHalf - 3, middle);
    for (int r = 0; r < 2; ++r) {
      const double y = middle + (r == 0 ? -28 : 28);
      const double edge = middle + (r == 0 ? -6 : 6);
      for (int i = 1; i < 4; ++i) box(kAt[i], y, values_of(ranks[r])[i], r);
      step(kF + 11, edge, kAt[1] - kHalf - 3, y);
      step(kAt[3] + kHalf + 3, y, kG - 11, edge);
      for (int i = 1; i < 3; ++i) {
        step(kAt[i] + kHalf + 3, y, kAt[i + 1] - kHalf - 3, y);
        figure.middle((kAt[i] + kAt[i + 1]) / 2, y - 6,
                      "× " + number(ranks[r].weights[i - 1]));
      }
    }
    for (const auto& [x, name, adds] :
         {std::tuple(kF, "f", !is_forward), std::tuple(kG, "g", is_forward)}) {
      figure.box({x - 9, middle - 16, 18, 32}, adds ? "comm" : "empty", name,
                 adds ? kWhite : kInk);
      figure.middle(x, middle + 58, adds ? "adds" : "copies",
                    adds ? "comm" : kMuted);
    }
  };
  figure.heading("Forward: values, from left to right");
  panel(true, {"x", "", "x W1", "term of y", "y"});
  figure.heading("Backward: gradients, from right to left");
  panel(false, {"dx", "", "d(x W1)", "d(term)", "dy"});
  return figure.svg(fmt::format(
      "Forward, rank 0 has the term {:.0f} and rank 1 {:.0f}; g adds them to "
      "{:.0f}. Backward, rank 0 has {:.0f} and rank 1 {:.0f}; f adds them to "
      "{:.0f}.",
      ranks[0].forward[3], ranks[1].forward[3], ranks[0].forward[4],
      ranks[0].backward[1], ranks[1].backward[1], ranks[0].backward[0]));
}

// Exposed communication as a share of the step of 24 blocks, by width.
std::vector<Value> exposed_shares(const char* cluster, int ranks, int batch,
                                  const std::vector<double>& widths) {
  const bool is_textbook = cluster == std::string("textbook");
  return sweep(
      [&](double width) {
        return "07_tensor_parallel" +
               on_shapes(cluster, ranks, gpt_of(24, width, 32, 50304, 2048),
                         batch, 1024) +
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
  const std::vector<Case> cases = {
      {"8 ranks of textbook, f32", "textbook", 8, kBlue,
       least_width(8, 4, textbook::kRate, textbook::kBandwidth)},
      {"16 A100 of two nodes, bf16", "dgx-a100", 16, kOrange,
       least_width(16, 2, rate, a100.nics_per_node * a100.network.bytes_per_s)},
      {"8 A100 of a node, bf16", "dgx-a100", 8, kGreen,
       least_width(8, 2, rate, a100.intra_node.bytes_per_s)}};
  const std::vector<double> widths = {768,  1024, 1280, 1536, 2048,
                                      3072, 4096, 6144, 8192, 12288};

  Plot plot(
      "Above (t − 1)eγ/9β, products outweigh the all-reduces\n"
      "Dashed from top to bottom: this width. Curves: 8192 tokens in a step; "
      "dots: 32768",
      {50, 410, 250}, logarithmic("width h", 768, 12288),
      {"exposed communication, share of the step", 0, 0.8, kPercent});
  for (const Case& each : cases) {
    const auto shares = exposed_shares(each.cluster, each.ranks, 8, widths);
    plot.mark(each.width, each.stroke, fmt::format("{:.0f}", each.width));
    plot.curve(shares, each.stroke, each.name);
    // Four times the tokens
    if (each.cluster == std::string("textbook")) {
      plot.dots(exposed_shares(each.cluster, each.ranks, 32, widths),
                each.stroke);
    }
  }
  return plot.svg();
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
  Plot plot(fmt::format(
                "Eight A100 of a node are {:.1f} times as fast as one, 32 only "
                "{:.1f} times",
                times[0].y / times[3].y, times[0].y / times[5].y),
            {60, 460, 230}, logarithmic("ranks t", 1, 32),
            {"a step of GPT 6.7B, bf16, 8 samples; in percent: exposed", 0.032,
             2.048, kMilliseconds, true});
  plot.mark(11.3, kGray, "edge of the node");
  plot.curve(ideal, kGray, "1/t");
  plot.dotted_curve(times, kBlue, "step");
  for (std::size_t i = 1; i < times.size(); ++i) {
    plot.text(times[i].x, times[i].y,
              fmt::format("{:.0f} %", 100 * exposed[i].y), kBlue, {-4, -10});
  }
  return plot.svg();
}

std::vector<PageFigure> all() {
  return {{"chapters/07_tensor_parallel/mlp.svg", mlp},
          {"chapters/07_tensor_parallel/conjugate.svg", conjugate},
          {"chapters/07_tensor_parallel/threshold.svg", threshold},
          {"chapters/07_tensor_parallel/speed.svg", speed}};
}

}  // namespace shardbook::figures::page_07
