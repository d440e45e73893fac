// One device: GPT-2 in numbers, memory over one step, and when less memory for
// activations pays.

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "chapters/common/run/kept.h"
#include "chapters/figures/pages.h"
#include "chapters/figures/runs.h"
#include "chapters/pictures/timeline_picture.h"
#include "core/check.h"

namespace shardbook::figures::page_00 {
namespace {

// A value that a block keeps, in widths of the model.
struct Width {
  const char* name;
  double h;
  bool is_mlp;
};

const char* kind_of(const Width& value) {
  return value.is_mlp ? "weights" : "kind-activation";
}

double sum_of(const std::vector<Width>& values) {
  double sum = 0;
  for (const Width& value : values) sum += value.h;
  return sum;
}

constexpr double kWidth = 22, kBar = 18;

void draw_block(Figure& figure, const std::string& title,
                const std::vector<Width>& values, double left, double top) {
  constexpr double kRow = 23;
  figure.text(left, top + 12, title);
  double y = top + 22;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const Width& value = values[i];
    if (i > 0 && value.is_mlp && !values[i - 1].is_mlp) y += 8;
    figure.box({left, y, kWidth * value.h, kBar}, kind_of(value));
    const std::string width =
        value.h == 1 ? "h" : fmt::format("{:g}h", value.h);
    const bool has_room = value.h >= 1;
    if (has_room) figure.text(left + 3, y + 13, width, kWhite);
    figure.text(left + kWidth * value.h + 5, y + 13,
                has_room ? value.name : width + " " + value.name);
    y += kRow;
  }
}

// All values of a block one behind the other.
void draw_sum(Figure& figure, const std::string& title,
              const std::vector<Width>& values) {
  const double top = figure.add_row(22 + kBar + 12);
  figure.text(0, top + 14,
              fmt::format("{}: {:g}h per token", title, sum_of(values)));
  double x = 0;
  for (const bool is_mlp : {false, true}) {
    std::vector<Width> half;
    for (const Width& value : values) {
      if (value.is_mlp == is_mlp) half.push_back(value);
    }
    const double width = kWidth * sum_of(half);
    figure.box({x, top + 20, width, kBar}, kind_of(half[0]));
    figure.text(x + 3, top + 33,
                fmt::format("{:g}h {}", sum_of(half),
                            is_mlp ? "for the MLP" : "for attention"),
                kWhite);
    x += width;
  }
}

std::string block() {
  const std::vector<Width> gpt = {{"x", 1, false},
                                  {"ln_1", 1, false},
                                  {"queries, keys, values", 3, false},
                                  {"attention", 1, false},
                                  {"y = x + c_proj", 1, true},
                                  {"ln_2", 1, true},
                                  {"c_fc", 4, true},
                                  {"GELU", 4, true}};
  // h = 4096, 32 heads that share 8 of keys and values, MLP of 14336
  const std::vector<Width> llama = {
      {"x", 1, false},         {"norm", 1, false},
      {"queries", 1, false},   {"keys, values", 0.5, false},
      {"attention", 1, false}, {"y = x + o_proj", 1, true},
      {"norm", 1, true},       {"gate", 3.5, true},
      {"up", 3.5, true},       {"SiLU(gate) · up", 3.5, true}};
  // The sum is what the program counts, except the statistics
  const ModelConfig config = ModelConfig::read("gpt2");
  KeptSizes sizes;
  sizes.rows = sizes.tokens = 1;
  const auto h = static_cast<double>(config.n_embd);
  const auto heads = static_cast<double>(config.n_head);
  SB_CHECK(kept_by_block(config, sizes) == 4 * (sum_of(gpt) * h + 4 + heads),
           "block.svg: a block keeps other values than those in the figure");
  Figure figure(
      "Kept per token and block: GPT-2 16h, Llama 3.1 8B 17h\n"
      "A bar is a vector that backward needs; h is 768 numbers in GPT-2, 4096 "
      "in Llama.",
      440);
  const double top = figure.add_row(24 + 23 * 10 + 16);
  draw_block(figure, "GPT-2", gpt, 0, top);
  draw_block(figure, "Llama 3.1 8B", llama, 236, top);
  draw_sum(figure, "GPT-2", gpt);
  draw_sum(figure, "Llama 3.1 8B", llama);
  return figure.svg("");
}

// A row of a block: an operation, its parameters, and the value it returns, in
// widths of the model.
struct Operation {
  const char* name;
  double parameters;
  double width;
  bool is_kept;
  const char* value;
};

std::string short_number(double parameters) {
  return parameters < 1e5 ? fmt::format("{:.3g} K", parameters / 1e3)
                          : fmt::format("{:.3g} M", parameters / 1e6);
}

std::string gpt() {
  const ModelConfig config = ModelConfig::read("gpt2");
  const auto h = static_cast<double>(config.n_embd);
  const auto vocabulary = static_cast<double>(config.vocab_size);
  const auto positions = static_cast<double>(config.n_positions);
  const auto blocks = static_cast<double>(config.n_layer);
  const std::vector<Operation> rows = {
      {"", 0, 1, true, "x"},
      {"ln_1", 2 * h, 1, true, ""},
      {"c_attn", 3 * h * h + 3 * h, 3, true, "queries, keys, values"},
      {"attention", 0, 1, true, ""},
      {"c_proj", h * h + h, 1, false, ""},
      {"+", 0, 1, true, "y"},
      {"ln_2", 2 * h, 1, true, ""},
      {"c_fc", 4 * h * h + 4 * h, 4, true, ""},
      {"GELU", 0, 4, true, ""},
      {"c_proj", 4 * h * h + h, 1, false, ""},
      {"+", 0, 1, false, "x of the next block"}};
  double in_block = 0, kept = 0;
  for (const Operation& row : rows) {
    in_block += row.parameters;
    if (row.is_kept) kept += row.width;
  }
  const double all =
      (vocabulary + positions + 2) * h + blocks * in_block;  // ln_f: 2 h
  SB_CHECK(kept == 16 && all == 124439808,
           "gpt.svg: not the GPT-2 that the program trains");

  Figure figure(fmt::format(
      "{:.0f} of GPT-2's {:.0f} million parameters are in twelve equal blocks\n"
      "b samples of s tokens from top to bottom; a token is a vector of h = "
      "{:.0f} numbers",
      blocks * in_block / 1e6, all / 1e6, h));
  figure.legend({{"kind-parameter", "has parameters: K thousand, M million"},
                 {"copy", "has none"},
                 {"kind-activation", "kept for backward"},
                 {"empty", "not kept"}});
  constexpr double kRow = 29, kBox = 20, kModel = 158, kBlock = 258,
                   kValues = 400, kWidth = 26;
  const double top = figure.add_row(24 + kRow * 11);
  const auto y_of = [&](double row) { return top + 24 + kRow * row; };
  const auto box = [&](double left, double row, double width,
                       const std::string& name, double parameters) {
    named_box(figure, {left, y_of(row), width, kBox},
              color_of(parameters > 0 ? "kind-parameter" : "copy"),
              parameters > 0 ? name + " " + short_number(parameters) : name);
  };
  const auto down = [&](double x, double from, double to) {
    arrow(figure, {x, y_of(from) + kBox}, {x, y_of(to)}, kMuted);
  };

  // The model
  const double middle = kModel / 2;
  figure.text(0, top + 12, "the model");
  figure.middle(middle, y_of(0) + 14, "token ids [b, s]");
  box(0, 1, kModel, "token table", vocabulary * h);
  box(0, 2, kModel, "+ position table", positions * h);
  box(0, 3, kModel, "block 0", in_block);
  box(0, 4, kModel, "block 1", in_block);
  figure.middle(middle, y_of(5) + 14, "... [b, s, h] ...");
  box(0, 6, kModel, "block 11", in_block);
  box(0, 7, kModel, "ln_f", 2 * h);
  named_box(figure, {0, y_of(8), kModel, kBox}, color_of("kind-parameter"),
            "head: the token table");
  figure.middle(middle, y_of(9) + 14, "logits [b, s, 50257]");
  box(0, 10, kModel, "loss: one number", 0);
  for (int row = 0; row < 10; ++row) down(middle, row, row + 1);
  for (const auto& [from, to] : {std::pair<double, double>{0, 0}, {kBox, 10}}) {
    figure.line({{kModel, y_of(4) + from}, {kBlock - 36, y_of(to) + from}},
                kPale, 1);
  }

  // A block, and what its operations return
  figure.text(kBlock, top + 12, "a block");
  figure.text(kValues, top + 12, "returns for each token: 16h kept");
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const Operation& row = rows[i];
    const auto place = static_cast<double>(i);
    const double y = y_of(place);
    const bool is_input = i == 0;
    if (is_input) {
      figure.middle(kBlock + 60, y + 14, "x of this block");
    } else {
      box(kBlock, place, 120, row.name, row.parameters);
      down(kBlock + 60, place - 1, place);
    }
    figure.box({kValues, y + 1, kWidth * row.width, kBox - 2},
               row.is_kept ? "kind-activation" : "empty");
    figure.text(kValues + 5, y + 14,
                row.width == 1 ? "h" : fmt::format("{:g}h", row.width),
                row.is_kept ? kWhite : kInk);
    figure.text(kValues + kWidth * row.width + 6, y + 14, row.value);
  }
  // Both additions take the value from before the norm
  for (const int from : {0, 5}) {
    const double x = kBlock - 16, begin = y_of(from) + kBox / 2;
    const double end = y_of(from == 0 ? 5 : 10) + kBox / 2;
    const double left = from == 0 ? kBlock + 6 : kBlock;
    figure.line({{left, begin + 2}, {x, begin + 2}, {x, end - 2}}, kMuted, 1.2);
    arrow(figure, {x, end - 2}, {kBlock, end - 2}, kMuted);
  }
  return figure.svg(fmt::format(
      "The values that a block keeps are {:g} h numbers per token.", kept));
}

std::string memory() {
  const auto timelines = [](const char* options) {
    return run("00_single_device" +
               on_shapes("kaggle-t4x2", 1, "gpt2", 16, 1024) + options)
        .timelines;
  };
  return pictures::memories(
             "Each of three methods makes a step fit into the 14.9 GiB of a "
             "T4\n"
             "One step of GPT-2 with 16 samples of 1024 tokens",
             {{"plain f32, does not fit", timelines("")},
              {"4 micro-batches", timelines(" --micro-batches 4")},
              {"recomputation", timelines(" --recompute")},
              {"f16 with f32 masters",
               timelines(" --dtype f16 --master-weights")}})
      .svg;
}

double peak_of(const Report& report) {
  std::int64_t most = 0;
  for (const sim::MemorySample& sample : first_rank(report).memory) {
    most = std::max(most, sample.total());
  }
  return static_cast<double>(most);
}

constexpr double kGiB = 1 << 30;

std::string threshold() {
  constexpr double kSeq = 256, kMost = 32;
  const ModelConfig config = ModelConfig::read("gpt2-xl");
  const auto h = static_cast<double>(config.n_embd);
  const auto line = [&](double batch) {
    return "00_single_device --steps 2" +
           on_shapes("dgx-a100", 1, "gpt2-xl", batch, kSeq);
  };
  const auto peaks = [&](const std::string& options) {
    return sweep(line(1) + options, "--batch", {1, 4, 5, 6, 8, 16, kMost},
                 peak_of, kSeq);
  };
  const auto plain = peaks("");
  const auto bf16 = peaks(" --dtype bf16 --master-weights");
  const auto again = peaks(" --recompute");
  const auto pieces = sweep(
      [&](double batch) {
        return line(batch) + fmt::format(" --micro-batches {}", batch / 2);
      },
      {2, 4, kMost}, peak_of, kSeq);

  Figure figure(
      "Up to 3h/4 tokens, a step's activations are free; beyond, they cost "
      "memory\n"
      "Peak memory of a step of GPT-2 XL, h = 1600");
  Plot plot(figure, PlotSize{50, 400, 260},
            marked("tokens per step", {0, 1024, 2048, 4096, 6144, 8192}),
            {"peak of a step", 0, 60 * kGiB, {"GiB", kGiB}});
  const double knee = 0.75 * h;
  plot.mark(knee, kGray, fmt::format("inequality: {:.0f}", knee));
  plot.curve(plain, kBlue, "f32");
  plot.curve(bf16, kOrange, "bf16, f32 masters");
  plot.curve(pieces, kPurple, "f32, micro-batches of 512");
  plot.curve(again, kGreen, "f32, recomputed");
  plot.labels();
  plot.text(8000, 18 * kGiB, "least: 16 bytes for each parameter, 23.2 GiB",
            {kInk, ""}, Figure::Anchor::kEnd);
  return figure.svg(fmt::format(
      "f32 stays at {:.1f} GiB up to {:.0f} tokens and rises to {:.1f} at "
      "{:.0f}. With recomputation it ends at {:.1f}, in pieces at {:.1f}, bf16 "
      "at {:.1f}.",
      plain[0].y / kGiB, plain[1].x, plain.back().y / kGiB, plain.back().x,
      again.back().y / kGiB, pieces.back().y / kGiB, bf16.back().y / kGiB));
}

std::string trade() {
  // Where the number of micro-batches is free to stand
  struct Pieces {
    int pieces;
    Point plain, again;
  };
  const std::vector<Pieces> runs = {{16, {14, 4}, {-14, 4}},
                                    {8, {12, -8}, {-12, 4}},
                                    {4, {0, 18}, {-10, 15}},
                                    {2, {0, 18}, {0, -9}},
                                    {1, {0, 18}, {0, -9}}};
  Figure figure(
      "From 3 GiB on, micro-batches alone are fastest; below, recomputation "
      "helps\n"
      "GPT-2 in bf16, 16 samples of 1024 tokens on an A100, in 1 to 16 "
      "micro-batches");
  Plot plot(figure, PlotSize{60, 560, 240},
            {"peak memory", 0, 10 * kGiB, {"GiB", kGiB}},
            {"time of a step", 0, 0.35, {"ms", 1e-3}});
  std::string details;
  for (const bool recompute : {false, true}) {
    const Stroke& stroke = recompute ? kOrange : kBlue;
    std::vector<Value> values;
    for (const Pieces& each : runs) {
      const Report report =
          run("00_single_device" + on_shapes("dgx-a100", 1, "gpt2", 16, 1024) +
              fmt::format(" --steps 2 --dtype bf16 --master-weights "
                          "--micro-batches {} --{}recompute",
                          each.pieces, recompute ? "" : "no-"));
      values.push_back({peak_of(report), report.time.step_s});
      plot.text(values.back().x, values.back().y, std::to_string(each.pieces),
                stroke, Figure::Anchor::kMiddle,
                recompute ? each.again : each.plain);
      details += fmt::format("{}{} micro-batches: {:.2f} GiB, {:.0f} ms. ",
                             recompute ? "recomputed, " : "", each.pieces,
                             values.back().x / kGiB, values.back().y * 1e3);
    }
    plot.dotted_curve(values, stroke);
    if (recompute) {
      plot.text(4.1 * kGiB, 0.165, "with recomputation", stroke);
    } else {
      plot.text(6.6 * kGiB, 0.075, "micro-batches alone", stroke);
    }
  }
  return figure.svg(details);
}

}  // namespace

std::vector<PageFigure> all() {
  return {{"chapters/00_single_device/block.svg", block},
          {"chapters/00_single_device/gpt.svg", gpt},
          {"chapters/00_single_device/memory.svg", memory},
          {"chapters/00_single_device/threshold.svg", threshold},
          {"chapters/00_single_device/trade.svg", trade}};
}

}  // namespace shardbook::figures::page_00
