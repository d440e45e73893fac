// One device: a block in numbers, and memory over one step.

#include <fmt/format.h>

#include "chapters/common/run/kept.h"
#include "chapters/figures/pages.h"
#include "chapters/figures/runs.h"
#include "chapters/pictures/timeline_picture.h"
#include "core/check.h"

namespace shardbook::figures::page_00 {
namespace {

using pictures::Figure;

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
    if (has_room) {
      figure.text(left + 3, y + 13, width, Figure::Anchor::kStart, "#ffffff");
    }
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
                Figure::Anchor::kStart, "#ffffff");
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
      "A bar is a vector that backward needs; h is 768 numbers in "
      "GPT-2, 4096 in Llama.",
      440);
  const double top = figure.add_row(24 + 23 * 10 + 16);
  draw_block(figure, "GPT-2", gpt, 0, top);
  draw_block(figure, "Llama 3.1 8B", llama, 236, top);
  draw_sum(figure, "GPT-2", gpt);
  draw_sum(figure, "Llama 3.1 8B", llama);
  return figure.svg("");
}

std::string memory() {
  const Options options = on_shapes("dgx-a100", 1, "gpt2", 8, 1024);
  Options bf16 = options;
  bf16.dtype = DType::kBF16;
  single_device::SingleDeviceOptions pieces, recompute, masters;
  pieces.num_micro_batches = 4;
  recompute.recompute = true;
  masters.master_weights = true;
  return pictures::memories(
             "Micro-batches, recomputation and 16 bits lower the peak\n"
             "One step of GPT-2 with 8 samples of 1024 tokens on an A100",
             {{"plain", run_one_device(options).timelines},
              {"4 micro-batches", run_one_device(options, pieces).timelines},
              {"recomputation", run_one_device(options, recompute).timelines},
              {"bf16", run_one_device(bf16, masters).timelines}})
      .svg;
}

}  // namespace

std::vector<PageFigure> all() {
  return {{"chapters/00_single_device/block.svg", block},
          {"chapters/00_single_device/memory.svg", memory}};
}

}  // namespace shardbook::figures::page_00
