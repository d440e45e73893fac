// One device: GPT-2 in numbers, memory over one step, and when less memory for
// activations pays.

#include <fmt/format.h>

#include <utility>

#include "chapters/common/run/kept.h"
#include "chapters/figures/figures.h"
#include "chapters/pictures/timeline_picture.h"
#include "core/check.h"

namespace shardbook::figures::page_00 {

// Values that a block keeps for attention and for the MLP, in widths of the
// model.
struct Width {
  const char* name;
  double h;
};
struct BlockValues {
  const char* model;
  std::vector<Width> attention, mlp;
};

double sum_of(const std::vector<Width>& values) {
  double sum = 0;
  for (const Width& value : values) sum += value.h;
  return sum;
}

std::string width_text(double h) {
  return h == 1 ? "h" : fmt::format("{:g}h", h);
}

constexpr double kWidth = 22, kBar = 18;

void draw_block(Figure& figure, const BlockValues& block, double left,
                double top) {
  constexpr double kRow = 23;
  figure.text(left, top + 12, block.model);
  double y = top + 22;
  for (const auto* half : {&block.attention, &block.mlp}) {
    for (const auto& [name, h] : *half) {
      figure.box({left, y, kWidth * h, kBar},
                 half == &block.mlp ? "weights" : "kind-activation");
      const bool has_room = h >= 1;
      if (has_room) figure.text(left + 3, y + 13, width_text(h), kWhite);
      figure.text(left + kWidth * h + 5, y + 13,
                  has_room ? name : width_text(h) + " " + name);
      y += kRow;
    }
    y += 8;
  }
}

// All values of a block one behind the other.
void draw_sum(Figure& figure, const BlockValues& block) {
  const double top = figure.add_row(22 + kBar + 12);
  const double attention = sum_of(block.attention), mlp = sum_of(block.mlp);
  figure.text(0, top + 14,
              fmt::format("{}: {:g}h per token", block.model, attention + mlp));
  const double middle = kWidth * attention;
  figure.stack({0, top + 20, 0, kBar},
               {{middle, "kind-activation"}, {kWidth * mlp, "weights"}});
  figure.text(3, top + 33, fmt::format("{:g}h for attention", attention),
              kWhite);
  figure.text(middle + 3, top + 33, fmt::format("{:g}h for the MLP", mlp),
              kWhite);
}

std::string block() {
  const BlockValues gpt = {
      "GPT-2",
      {{"x", 1}, {"ln_1", 1}, {"queries, keys, values", 3}, {"attention", 1}},
      {{"y = x + c_proj", 1}, {"ln_2", 1}, {"c_fc", 4}, {"GELU", 4}}};
  // h = 4096, 32 heads that share 8 of keys and values, MLP of 14336
  const BlockValues llama = {"Llama 3.1 8B",
                             {{"x", 1},
                              {"norm", 1},
                              {"queries", 1},
                              {"keys, values", 0.5},
                              {"attention", 1}},
                             {{"y = x + o_proj", 1},
                              {"norm", 1},
                              {"gate", 3.5},
                              {"up", 3.5},
                              {"SiLU(gate) · up", 3.5}}};
  // The sum is what the program counts, except the statistics
  const ModelConfig config = ModelConfig::read("gpt2");
  KeptSizes sizes;
  sizes.rows = sizes.tokens = 1;
  const double widths = sum_of(gpt.attention) + sum_of(gpt.mlp);
  SB_CHECK(kept_by_block(config, sizes) ==
               4 * (widths * config.n_embd + 4 + config.n_head),
           "block.svg: a block keeps other values than those in the figure");
  Figure figure(
      "Kept per token and block: GPT-2 16h, Llama 3.1 8B 17h\n"
      "A bar is a vector that backward needs; h is 768 numbers in GPT-2, 4096 "
      "in Llama.",
      440);
  const double top = figure.add_row(24 + 23 * 10 + 16);
  draw_block(figure, gpt, 0, top);
  draw_block(figure, llama, 236, top);
  draw_sum(figure, gpt);
  draw_sum(figure, llama);
  return figure.svg();
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
  const double h = config.n_embd;
  const double vocabulary = config.vocab_size;
  const double positions = config.n_positions;
  const double blocks = config.n_layer;
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
  figure.legend({"kind-parameter: has parameters: K thousand, M million",
                 "copy: has none", "kind-activation: kept for backward",
                 "empty: not kept"});
  constexpr double kRow = 29, kBox = 20, kModel = 158, kBlock = 258,
                   kValues = 400, kWidth = 26;
  const double top = figure.add_row(24 + kRow * 11);
  const auto y_of = [&](double row) { return top + 24 + kRow * row; };
  const auto box = [&](double left, double row, double width,
                       const std::string& name, double parameters) {
    figure.box({left, y_of(row), width, kBox},
               parameters > 0 ? "kind-parameter" : "copy",
               parameters > 0 ? name + " " + short_number(parameters) : name);
  };
  const auto down = [&](double x, double from, double to) {
    figure.arrow({x, y_of(from) + kBox}, {x, y_of(to)}, kMuted);
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
  figure.box({0, y_of(8), kModel, kBox}, "kind-parameter",
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
    const double y = y_of(i);
    if (i == 0) {
      figure.middle(kBlock + 60, y + 14, "x of this block");
    } else {
      box(kBlock, i, 120, row.name, row.parameters);
      down(kBlock + 60, i - 1, i);
    }
    figure.box({kValues, y + 1, kWidth * row.width, kBox - 2},
               row.is_kept ? "kind-activation" : "empty");
    figure.text(kValues + 5, y + 14, width_text(row.width),
                row.is_kept ? kWhite : kInk);
    figure.text(kValues + kWidth * row.width + 6, y + 14, row.value);
  }
  // Both additions take the value from before the norm
  for (const int from : {0, 5}) {
    const double x = kBlock - 16, begin = y_of(from) + kBox / 2;
    const double end = y_of(from == 0 ? 5 : 10) + kBox / 2;
    const double left = from == 0 ? kBlock + 6 : kBlock;
    figure.line({{left, begin + 2}, {x, begin + 2}, {x, end - 2}}, kMuted, 1.2);
    figure.arrow({x, end - 2}, {kBlock, end - 2}, kMuted);
  }
  return figure.svg(fmt::format(
      "The values that a block keeps are {:g} h numbers per token.", kept));
}

std::string memory() {
  const auto timelines = [](const char* options) {
    return run_once("00_single_device" +
                    on_shapes("kaggle-t4x2", 1, "gpt2", 16, 1024) + options)
        .timelines;
  };
  return memories(
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
  return most_of(first_rank(report).memory, &sim::MemorySample::total);
}

constexpr double kGiB = 1 << 30;

std::string threshold() {
  constexpr double kSeq = 256, kMost = 32;
  const ModelConfig config = ModelConfig::read("gpt2-xl");
  const double h = config.n_embd;
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

  Plot plot(
      "Up to 3h/4 tokens, a step's activations are free; beyond, they cost "
      "memory\n"
      "Peak memory of a step of GPT-2 XL, h = 1600",
      {50, 400, 260},
      marked("tokens per step", {0, 1024, 2048, 4096, 6144, 8192}),
      {"peak of a step", 0, 60 * kGiB, {"GiB", kGiB}});
  const double knee = 0.75 * h;
  plot.mark(knee, kGray, fmt::format("inequality: {:.0f}", knee));
  plot.curve(plain, kBlue, "f32");
  plot.curve(bf16, kOrange, "bf16, f32 masters");
  plot.curve(pieces, kPurple, "f32, micro-batches of 512");
  plot.curve(again, kGreen, "f32, recomputed");
  plot.labels();
  plot.end(8000, 18 * kGiB, "least: 16 bytes for each parameter, 23.2 GiB",
           kBlack);
  return plot.svg();
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
  Plot plot(
      "From 3 GiB on, micro-batches alone are fastest; below, recomputation "
      "helps\n"
      "GPT-2 in bf16, 16 samples of 1024 tokens on an A100, in 1 to 16 "
      "micro-batches",
      {60, 560, 240}, {"peak memory", 0, 10 * kGiB, {"GiB", kGiB}},
      {"time of a step", 0, 0.35, kMilliseconds});
  for (const bool recompute : {false, true}) {
    const Stroke& stroke = recompute ? kOrange : kBlue;
    std::vector<Value> values;
    for (const Pieces& each : runs) {
      const Report report = run_once(
          "00_single_device" + on_shapes("dgx-a100", 1, "gpt2", 16, 1024) +
          fmt::format(" --steps 2 --dtype bf16 --master-weights "
                      "--micro-batches {} --{}recompute",
                      each.pieces, recompute ? "" : "no-"));
      values.push_back({peak_of(report), report.time.step_s});
      plot.middle(values.back().x, values.back().y, std::to_string(each.pieces),
                  stroke, recompute ? each.again : each.plain);
      plot.describe(fmt::format("{}{} micro-batches: {:.2f} GiB, {:.0f} ms",
                                recompute ? "recomputed, " : "", each.pieces,
                                values.back().x / kGiB, values.back().y * 1e3));
    }
    plot.dotted_curve(values, stroke);
    if (recompute) {
      plot.text(4.1 * kGiB, 0.165, "with recomputation", stroke);
    } else {
      plot.text(6.6 * kGiB, 0.075, "micro-batches alone", stroke);
    }
  }
  return plot.svg();
}

std::vector<PageFigure> all() {
  return {{"chapters/00_single_device/block.svg", block},
          {"chapters/00_single_device/gpt.svg", gpt},
          {"chapters/00_single_device/memory.svg", memory},
          {"chapters/00_single_device/threshold.svg", threshold},
          {"chapters/00_single_device/trade.svg", trade}};
}

}  // namespace shardbook::figures::page_00
